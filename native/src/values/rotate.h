/* The codes behind um_rotate: one function for each instruction set. */
#ifndef UM_ROTATE_H
#define UM_ROTATE_H

#include <stddef.h>

#include "unimem.h"

/* All give the same bits. pre: as um_rotate. */
typedef void um__rotate_code(float *values, size_t n, size_t block);

/* Returns the i-th code that this CPU runs, the slowest first; NULL behind the last. */
um__rotate_code *um__rotate_code_at(size_t i);

/* Does the same as um_rotate, and cannot fail. pre: block and n are what um_rotate takes. */
void um__rotate_values(float *values, size_t n, size_t block);

#endif
