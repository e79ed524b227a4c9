/* An allocator with four functions only, as Electric Fence has hardly more: nothing of the C
 * library may see its memory. `raises` makes malloc raise a signal. */
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

volatile int raises;
static char arena[64 << 20];
static size_t n_used;

/* The size stands 64 bytes before the memory, among bytes that libc would take for its own. */
void *malloc(size_t nbytes) {
    if (raises) {
        raise(SIGALRM);
    }
    size_t at = __atomic_fetch_add(&n_used, (nbytes + 127) / 64 * 64, __ATOMIC_RELAXED);
    if (at + nbytes + 64 > sizeof arena) {
        return NULL;
    }
    memcpy(arena + at, &nbytes, sizeof nbytes);
    return arena + at + 64;
}

void free(void *at) {
    if (at != NULL && ((char *)at < arena || (char *)at >= arena + sizeof arena)) {
        static const char text[] = "memory of another allocator was freed\n";
        _exit(write(2, text, sizeof text - 1) > 0 ? 9 : 8);
    }
}

void *calloc(size_t n, size_t nbytes) {
    return malloc(n * nbytes);
}

void *realloc(void *at, size_t nbytes) {
    size_t was = 0;
    void *moved = malloc(nbytes);
    if (at != NULL) {
        memcpy(&was, (char *)at - 64, sizeof was);
        memcpy(moved, at, was < nbytes ? was : nbytes);
    }
    return moved;
}
