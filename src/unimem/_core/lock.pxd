# Locks for a few instructions of C: see docs/threads.md. No Python code runs while one is held, and
# a thread that waits for one stays in its critical sections. With the interpreter's lock they do
# nothing.
cdef extern from *:
    """
    #ifndef UNIMEM_LOCK
    #define UNIMEM_LOCK
    #ifdef Py_GIL_DISABLED
    #include <pthread.h>
    typedef pthread_mutex_t unimem_lock; /* zeros are an open one */
    #define unimem_hold(lock) ((void)pthread_mutex_lock(lock))
    #define unimem_let_go(lock) ((void)pthread_mutex_unlock(lock))
    #define UNIMEM_NO_GIL 1
    #else
    typedef char unimem_lock;
    #define unimem_hold(lock) ((void)(lock))
    #define unimem_let_go(lock) ((void)(lock))
    #define UNIMEM_NO_GIL 0
    #endif
    #endif
    """
    ctypedef struct Lock "unimem_lock":
        pass
    void hold "unimem_hold" (Lock *lock) noexcept nogil
    void let_go "unimem_let_go" (Lock *lock) noexcept nogil
    # Whether threads run Python at the same time.
    bint NO_GIL "UNIMEM_NO_GIL"
