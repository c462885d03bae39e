/* Performs the steps that build and confine a slot; see steps.c. */
#ifndef STEPS_H
#define STEPS_H

#include <stddef.h>

/* Performs an encoded list of steps. Returns NULL, or what failed, with the reason in errno. */
const char *perform(const char *list, size_t size);

/* Moves this process to the control groups in which every command starts. Returns 0, or -1 with the reason in errno. */
int join_command_groups(void);

/* Moves the descriptors of these groups to the lowest numbers from `number` on. Returns the first number after them, or
 * -1. */
int keep_command_groups(int number);

#endif
