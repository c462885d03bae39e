/* Performs the steps that build and confine a slot; see steps.c. */
#ifndef STEPS_H
#define STEPS_H

#include <stddef.h>

/* Performs an encoded list of steps. Returns NULL, or what failed, with the reason in errno. */
const char *perform(const char *list, size_t size);

#endif
