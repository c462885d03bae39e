/* Performing the steps that build and confine a slot; see steps.c. */
#ifndef STEPS_H
#define STEPS_H

#include <stddef.h>

/* Performs an encoded list of steps. NULL when all are done; else what failed, with the reason in errno. */
const char *perform(const char *list, size_t size);

#endif
