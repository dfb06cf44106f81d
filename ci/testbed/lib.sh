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
