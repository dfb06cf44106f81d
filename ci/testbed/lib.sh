# shellcheck shell=bash
# Shared by the scripts beside it. State of one test bed: one folder, so that several can be up at once.
#   $state/hosts             /etc/hosts of every host
#   $state/NAME.holder       "PID START": the process that keeps host NAME (or the switch) in being, and when it started

state=${TESTBED_DIR:-${TMPDIR:-/tmp}/dask-gpu-mpi-testbed}

# start_time PID: the clock tick that the process started at; with the PID it names one process for good, since PIDs come again
start_time() {
  local stat
  { read -r stat < "/proc/$1/stat"; } 2> /dev/null || return 1
  stat=${stat##*) }  # the command's name may hold spaces
  # shellcheck disable=SC2086  # fields are words; the 22nd of the file is the 20th after the name
  set -- $stat
  echo "${20}"
}

# holder NAME: prints the PID that holds NAME's namespaces; fails when it is not there any more
holder() {
  local pid start
  { read -r pid start < "$state/$1.holder"; } 2> /dev/null || return 1
  [[ $(start_time "$pid") == "$start" ]] || return 1
  echo "$pid"
}

# --- cgroups (version 1) of slurm-up's daemons. Debian's slurmd calls its own after its node, so one test bed has them at a time.
# shellcheck disable=SC2034  # used by who sources this
groups=/sys/fs/cgroup
# shellcheck disable=SC2034
controllers=(devices freezer memory)

# why_no_cgroups: prints why jobs can't be confined on this machine; fails when they can
why_no_cgroups() {
  local controller
  for controller in "${controllers[@]}"; do
    if [[ ! -w $groups/$controller/release_agent ]]; then
      echo "no writable hierarchy of cgroup version 1 at $groups/$controller"
      return 0
    fi
  done
  return 1
}

# remove_groups GROUP...: what still runs in them is killed. The kernel lets go of a group some time after its last process.
remove_groups() {
  local group pid try
  for group in "$@"; do
    for ((try = 0; try < 50; try++)); do
      [[ -d $group ]] || break
      while read -r pid; do kill -KILL "$pid" 2> /dev/null || true; done \
        < <(find "$group" -name cgroup.procs -exec cat {} + 2> /dev/null)
      find "$group" -depth -type d -exec rmdir {} + 2> /dev/null || sleep 0.05
    done
  done
}

# remove_slurm: the files and the cgroups of slurm-up, when its daemons are gone
remove_slurm() {
  local made=()
  if [[ -e $state/slurm/groups ]]; then mapfile -t made < "$state/slurm/groups"; fi
  remove_groups "${made[@]}"
  rm -rf "$state/slurm"
}
