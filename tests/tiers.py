"""Which rows of real jobs ci/test.sh runs: at least one of everything that can break by itself.

ci/matrix.sh and ci/faults.sh run all others. To move a row, or a whole file, write its line here or take it away.
"""

from __future__ import annotations

__all__ = ["QUICK"]

BOTH = ("openmpi", "mpich")
MPICH = ("mpich",)
OPEN_MPI = ("openmpi",)

#: The MPIs under which ci/test.sh runs it, by file, test, or test with parameters. What is here under one of them differs little
#: between the MPIs, and its job under the other is one of theirs. Both run beside each other: they are to end together.
QUICK = {
    # the main job: the command, initialize(), each layout, with and without a launcher, and how it looks to dask-mpi's users
    "mpi/test_main_job.py::test_command_with_four_ranks": BOTH,
    "mpi/test_main_job.py::test_command_with_what_python_runs[module]": MPICH,
    "mpi/test_main_job.py::test_initialize_with_two_ranks_and_workers_in_the_agents": BOTH,
    "mpi/test_main_job.py::test_command_without_a_launcher_and_a_class_beside_the_script": MPICH,
    "mpi/test_main_job.py::test_exclusive_layout_and_a_class_of_the_script": MPICH,
    "mpi/test_main_job.py::test_plan_of_a_pretended_allocation[json]": MPICH,
    "mpi/test_drop_in.py::test_arguments_are_dask_mpis_in_their_order": MPICH,
    "mpi/test_drop_in.py::test_positional_arguments_exit_false_and_mpi_afterwards": BOTH,
    "mpi/test_drop_in.py::test_execute_returns_the_result": MPICH,
    # GPUs that are emulated: who has which, and who makes contexts
    "mpi/test_gpus.py::test_one_rank_and_a_cpu_worker": BOTH,
    "mpi/test_gpus.py::test_each_rank_has_gpus_of_its_own": MPICH,
    "mpi/test_geometries.py::test_a_rank_per_socket_bound_to_its_cores": MPICH,
    "mpi/test_contexts.py": OPEN_MPI,
    "mpi/test_default_workers.py::test_where_tasks_run_that_ask_for_nothing[gpu]": MPICH,
    # the live view, and what scripts get
    "mpi/test_top.py::test_once_and_json": MPICH,
    "mpi/test_top.py::test_rows_keys_and_the_terminal_afterwards": MPICH,
    # the gallery; ci/gallery.sh runs all of it
    "mpi/test_gallery.py::test_cpu_workers_beside_gpus": MPICH,
    # who listens
    "mpi/test_listeners.py::test_on_one_host_nothing_listens_beyond_loopback": BOTH,
    "mpi/test_dashboard.py::test_its_token_alone_opens_it": OPEN_MPI,
    "mpi/test_dashboard.py::test_without_it_nothing_listens_for_http[nannies]": MPICH,
    # bad input: of each place where it can be found one row, and launchers that do not fit the library
    "mpi/test_bad_input.py::test_refused[unknown CLI option-command]": BOTH,
    "mpi/test_bad_input.py::test_refused[unknown keyword-initialize]": MPICH,
    "mpi/test_bad_input.py::test_refused[unknown key in YAML-command]": MPICH,
    "mpi/test_bad_input.py::test_refused[unknown option of CUDAWorker-command]": MPICH,
    "mpi/test_bad_input.py::test_refused[interface that one rank has not-initialize]": MPICH,
    "mpi/test_bad_input.py::test_refused[port in use-command]": MPICH,
    "mpi/test_bad_input.py::test_refused[an option that is wrong on one rank-initialize]": MPICH,
    "mpi/test_bad_input.py::test_refused[ranks that see partly the same GPUs-initialize]": MPICH,
    "mpi/test_bad_input.py::test_refused[exclusive with two ranks-command]": BOTH,
    "mpi/test_bad_input.py::test_world_of_one_below_a_launcher[srun-command]": BOTH,
    "mpi/test_bad_input.py::test_foreign_launcher_is_told_once": BOTH,
    "mpi/test_bad_input.py::test_library_that_would_abort_in_init": MPICH,
    "mpi/test_bad_input.py::test_no_mpi_library[2-command]": MPICH,
    "mpi/test_bad_input.py::test_syntax_error_is_the_users": MPICH,
    # the preflight
    "mpi/test_check.py::test_all_is_well": BOTH,
    "mpi/test_check.py::test_gpus": MPICH,
    "mpi/test_check.py::test_version_that_differs_on_one_rank": MPICH,
    "mpi/test_check.py::test_bad_input[2]": MPICH,
    # the one command
    "mpi/test_launch.py::test_everything_ends_with_launch[15]": BOTH,
    # clusters that others use, who gets in, and what is printed
    "mpi/test_joining.py::test_cluster_by_its_address": OPEN_MPI,
    "mpi/test_children.py::test_every_kind_of_process[tls]": OPEN_MPI,
    "mpi/test_children.py::test_a_notebook[jupyter]": MPICH,
    # gangs
    "mpi/test_spmd.py::test_group_and_environment[tls]": OPEN_MPI,
    "mpi/test_security.py": MPICH,
    "mpi/test_secrets.py": OPEN_MPI,
    "mpi/test_strangers.py": MPICH,
    "mpi/test_output.py::test_what_the_script_has_printed_before_its_job_is_aborted": BOTH,
    "mpi/test_report.py::test_the_figures_of_a_job": MPICH,
    # what the MPIs do differently: begin, end, messages, variables, components
    "mpi/test_endings.py::test_the_job_ends[forked children]": BOTH,
    "mpi/test_killed.py::test_sigkill[other rank-auto]": BOTH,
    "mpi/test_mailbox.py": BOTH,
    "mpi/test_sniffing.py": BOTH,
    "mpi/test_messages.py::test_all_are_received_before_mpi_ends[sys.exit]": BOTH,
    "mpi/test_mpi4py.py::test_mpi_that_has_ended": BOTH,
    "mpi/test_openmpi.py::test_component_is_opened_only_where_it_is_wanted[None]": BOTH,
    "mpi/test_surroundings.py::test_all_that_the_launcher_adds_is_scrubbed_and_nothing_else": BOTH,
    # the harness, which all the others trust
    "mpi/test_harness.py::test_environment_for_each_rank": BOTH,
    "mpi/test_harness.py::test_timeout_tells_where_and_kills_all": MPICH,
    "mpi/test_harness.py::test_leak_is_found_and_ended": MPICH,
    # the first page of the docs
    "mpi/test_pages.py::test_start_here": MPICH,
    # several hosts
    "hosts/test_testbed.py::test_world_spans_two_hosts": BOTH,
    "hosts/test_testbed.py::test_no_namespaces_is_a_reason_to_skip": MPICH,
    "hosts/test_main_job.py::test_hosts_that_differ": BOTH,
    "hosts/test_check.py::test_all_hosts_reach_the_scheduler": MPICH,
    "hosts/test_interfaces.py::test_the_fast_network_that_leads_everywhere": MPICH,
    "hosts/test_pbs.py::test_chunk_per_host": OPEN_MPI,
    # UCX
    "ucx/test_beside_tls.py::test_command": BOTH,
    "ucx/test_connections.py": MPICH,
    "ucx/test_without_gpus.py::test_command": MPICH,
    # how jobs end
    "faults/test_endings.py::test_ending[returns-command]": MPICH,
    "faults/test_endings.py::test_ending[raises-initialize]": OPEN_MPI,
    "faults/test_endings.py::test_ending[leaves a task of 60 s-initialize]": MPICH,
    "faults/test_endings.py::test_ending[client.shutdown()-command]": OPEN_MPI,
    "faults/test_endings.py::test_ending[MPI.Finalize()-initialize]": BOTH,
    "faults/test_endings.py::test_ending[forks children that end-command]": MPICH,
    "faults/test_endings.py::test_quiet": OPEN_MPI,
    "faults/test_kills.py::test_worker[command]": MPICH,
    "faults/test_kills.py::test_agent_of_a_worker[initialize]": OPEN_MPI,
    "faults/test_kills.py::test_head[scheduler-initialize]": MPICH,
    "faults/test_shutdowns.py::test_scheduler_close[initialize-hangs]": OPEN_MPI,
    "faults/test_signals.py::test_signal_to_the_launcher[initialize-TERM]": BOTH,
    "faults/test_signals.py::test_sigterm_to_one_rank_without_the_script_alone[initialize-0-1]": OPEN_MPI,
    "faults/test_signals.py::test_walltime[initialize-end time]": MPICH,
    "faults/test_signals.py::test_walltime_of_a_script_that_forks": OPEN_MPI,
    "faults/test_starts.py::test_worker_that_dies_at_each_start[command]": MPICH,
}
