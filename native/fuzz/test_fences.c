/* Memory behind which nothing can be touched: fences.c. */
#include "fuzz.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

/* Whether a process may write a byte. */
static bool may_write(uint8_t *byte) {
    pid_t pid = fork();
    if (pid == 0) {
        signal(SIGSEGV, SIG_DFL);
        *(volatile uint8_t *)byte = 1;
        _exit(0);
    }
    int status = 0;
    PROMISED(waitpid(pid, &status, 0) == pid);
    PROMISED(status == 0 || (WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV));
    return status == 0;
}

int main(void) {
    enum { N = 200, LARGE = 1 << 20 };
    uint8_t *taken[N];
    /* Until it has no more slots, and then from the C library. */
    unsigned n_fenced = 0;
    for (unsigned i = 0; i < N; i++) {
        taken[i] = malloc(i);
        PROMISED(taken[i] != NULL);
        memset(taken[i], 0xff, i);
        PROMISED(i == 0 || may_write(taken[i] + i - 1));
        n_fenced += i < 32 && !may_write(taken[i] + i);
    }
    PROMISED(n_fenced == 32);
    for (unsigned i = 0; i < N; i++) {
        free(taken[i]);
    }
    /* A slot that was given back is taken again, and calloc clears it. */
    uint8_t *zeros = calloc(25, 4);
    PROMISED(zeros != NULL);
    for (unsigned i = 0; i < 100; i++) {
        PROMISED(zeros[i] == 0);
    }
    PROMISED(!may_write(zeros + 100));
    free(zeros);
    uint8_t *large = calloc(1, LARGE);
    PROMISED(large != NULL);
    PROMISED(may_write(large + LARGE - 1));
    free(large);
    free(NULL);
    return 0;
}
