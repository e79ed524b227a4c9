/* The guard: touching a mapped file that somebody truncates, and living on. */
#include "internal.h"
#include "os.h"
