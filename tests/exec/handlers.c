/* A library whose handlers of forks allocate, and wait for a thread that does. They ask for users,
 * too, for which the C library allocates. */
#include <pthread.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>

static void allocate(void) {
    void *volatile at = malloc(2 << 20);
    memset(at, 1, 2 << 20);
    free(at);
    getpwnam("root");
}

static void *allocate_too(void *nothing) {
    allocate();
    return nothing;
}

static void prepare(void) {
    pthread_t other;
    allocate();
    pthread_create(&other, NULL, allocate_too, NULL);
    pthread_join(other, NULL);
}

__attribute__((constructor)) static void begin(void) {
    pthread_atfork(prepare, allocate, allocate);
}
