/* A lock for a few instructions: a word that is zeros while it is open. */
#ifndef UM_LOCK_H
#define UM_LOCK_H

#include <stdatomic.h>
#include <stdint.h>

#include "os/os.h"

typedef _Atomic uint32_t um__lock; /* 1: taken; 2: taken, and others may wait */

static inline void um__lock_take(um__lock *lock) {
    uint32_t is_free = 0;
    if (!atomic_compare_exchange_strong(lock, &is_free, 1)) {
        while (atomic_exchange(lock, 2) != 0) {
            um__os_wait(lock, 2, 1000);
        }
    }
}

static inline void um__lock_drop(um__lock *lock) {
    if (atomic_exchange(lock, 0) == 2) {
        um__os_wake(lock);
    }
}

#endif
