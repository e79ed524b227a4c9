/* Threads that share one job, each on a CPU of its own. */
#ifndef BENCH_TEAM_H
#define BENCH_TEAM_H

/* Does the part `index` of `n`, and returns 0 or an errno. */
typedef int bench_work(void *job, int index, int n);

/* Runs a job with n threads, thread i on cpus[i modulo n_cpus]; returns 0, or the errno of one that
 * failed. A team of one is the caller, on cpus[0] for so long. */
int bench_run_team(bench_work *work, void *job, int n, const int *cpus, int n_cpus);

#endif
