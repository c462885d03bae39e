/* Builds and confines a slot by the steps that the server lists. namespaced/native_init.py describes the operations and
 * their encoding. Nothing is decided here; the first step that fails ends the slot.
 */
#define _GNU_SOURCE
#include "steps.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/openat2.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    JOIN = 1, UNSHARE, ENTER, MOUNT, MKDIR, WRITE, CHANGE_DIRECTORY, OPEN, OPEN_INSIDE, BECOME_ROOT, HOST_NAME, LOOPBACK,
    LIMIT, BE_ROOT, PRCTL, KEEP_CAPABILITIES, FILTER, SESSION, UMASK, OWN, OPEN_GROUP,
    COMMANDS_JOIN,
};

enum { MAX_STRINGS = 4, LAST_CAPABILITY = 63, MAX_GROUPS = 8 };

struct step {
    uint16_t operation, strings;
    uint32_t length;
    int64_t a, b;
} __attribute__((packed));

_Static_assert(sizeof(struct step) == 24, "as in native_init.py");

static int write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t count = write(fd, text, strlen(text));
    int error = errno;
    close(fd);
    errno = error;
    return count < 0 ? -1 : 0;
}

/* Moves a new descriptor to the number by which later steps name it. */
static int place(int fd, int number) {
    if (fd < 0)
        return -1;
    if (fd == number)
        return 0;
    int result = dup3(fd, number, O_CLOEXEC);
    close(fd);
    return result < 0 ? -1 : 0;
}

/* Opens the file that moves a process to a control group. A write to `tasks`, which only version 1 has, moves one thread
 * and, unlike a write to `cgroup.procs`, waits for nothing. */
static int open_group(const char *directory) {
    char path[4096];
    snprintf(path, sizeof path, "%s/tasks", directory);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd >= 0 || errno != ENOENT)
        return fd;
    snprintf(path, sizeof path, "%s/cgroup.procs", directory);
    return open(path, O_WRONLY | O_CLOEXEC);
}

static int command_groups[MAX_GROUPS], command_group_count;

static int add_command_group(int fd) {
    if (command_group_count == MAX_GROUPS) {
        errno = EMFILE;
        return -1;
    }
    command_groups[command_group_count++] = fd;
    return 0;
}

int join_command_groups(void) {
    for (int i = 0; i < command_group_count; i++)
        if (write(command_groups[i], "0", 1) < 0)
            return -1;
    return 0;
}

int keep_command_groups(int number) {
    for (int i = 0; i < command_group_count; i++, number++) {
        if (place(command_groups[i], number) < 0)
            return -1;
        command_groups[i] = number;
    }
    return number;
}

static int open_inside(int root, const char *path) {
    struct open_how how = {.flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    for (int tries = 0; tries < 128; tries++) {
        int fd = syscall(SYS_openat2, root, path, &how, sizeof how);
        if (fd >= 0 || errno != EAGAIN)
            return fd;
    }
    return -1;
}

static int become_root(void) {
    if (syscall(SYS_pivot_root, ".", ".") == 0) {
        if (umount2(".", MNT_DETACH) < 0)
            return -1;
    } else if (errno != EPERM || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0)
        return -1;
    return chdir("/");
}

static int loopback(void) {
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (control < 0)
        return -1;
    int result = ioctl(control, SIOCSIFFLAGS, &request), error = errno;
    close(control);
    errno = error;
    return result;
}

static int limit(int resource, rlim_t value) {
    struct rlimit limits;
    if (getrlimit(resource, &limits) < 0)
        return -1;
    if (limits.rlim_max == RLIM_INFINITY || value < limits.rlim_max)
        limits.rlim_max = value;
    limits.rlim_cur = limits.rlim_max;
    return setrlimit(resource, &limits);
}

static int be_root(void) {
    return setgroups(0, NULL) < 0 || setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0 ? -1 : 0;
}

static int keep_capabilities(uint64_t kept) {
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    uint32_t low = kept, high = kept >> 32;
    struct __user_cap_data_struct data[2] = {{low, low, 0}, {high, high, 0}};
    for (int capability = 0; capability <= LAST_CAPABILITY; capability++) {
        if (kept >> capability & 1 || prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0)
            continue;
        if (errno == EINVAL) /* beyond the last capability that this kernel knows */
            break;
        return -1;
    }
    if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) < 0)
        return -1;
    return syscall(SYS_capset, &head, data);
}

static int filter(const char *bytes, size_t size) {
    struct sock_filter program[size / sizeof(struct sock_filter)];
    struct sock_fprog described = {.len = size / sizeof *program, .filter = program};
    memcpy(program, bytes, size);
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &described, 0, 0);
}

static const char *none_if_empty(const char *text) { return *text ? text : NULL; }

static int perform_one(const struct step *step, char *const *text, const char *bytes) {
    switch (step->operation) {
    case OPEN_GROUP: return place(open_group(text[0]), step->a);
    case JOIN: return write(step->a, "0", 1) < 0 ? -1 : 0;
    case COMMANDS_JOIN: return add_command_group(step->a);
    case UNSHARE: return unshare(step->a);
    case ENTER: return setns(step->a, step->b);
    case MOUNT: return mount(text[0], text[1], none_if_empty(text[2]), step->a, none_if_empty(text[3]));
    case MKDIR: return mkdir(text[0], step->a) < 0 && !(step->b && errno == EEXIST) ? -1 : 0;
    case WRITE: return write_file(text[0], text[1]) < 0 && !step->a ? -1 : 0;
    case CHANGE_DIRECTORY: return chdir(text[0]);
    case OPEN: return place(open(text[0], O_PATH | O_CLOEXEC), step->a);
    case OPEN_INSIDE: return place(open_inside(step->b, text[0]), step->a);
    case BECOME_ROOT: return become_root();
    case HOST_NAME: return sethostname(text[0], strlen(text[0]));
    case LOOPBACK: return loopback();
    case LIMIT: return limit(step->a, step->b);
    case BE_ROOT: return be_root();
    case PRCTL: return prctl(step->a, step->b, 0, 0, 0);
    case KEEP_CAPABILITIES: return keep_capabilities(step->a);
    case FILTER: return filter(bytes, step->length);
    case SESSION: return setsid() < 0 ? -1 : 0;
    case UMASK: umask(step->a); return 0;
    case OWN: return chown(text[0], step->a, step->a);
    }
    errno = ENOSYS;
    return -1;
}

static const char *describe(const struct step *step, char *const *text) {
    static char message[512];
    if (step->operation == MOUNT)
        snprintf(message, sizeof message, "mount %.100s on %.300s", *text[2] ? text[2] : "bind", text[1]);
    else
        snprintf(message, sizeof message, "step %d %.300s", step->operation, step->strings ? text[0] : "");
    return message;
}

const char *perform(const char *list, size_t size) {
    const char *end = list + size;
    while (list < end) {
        struct step step;
        char *text[MAX_STRINGS] = {"", "", "", ""};
        memcpy(&step, list, sizeof step);
        const char *bytes = list + sizeof step, *next = bytes;
        for (int i = 0; i < step.strings && i < MAX_STRINGS; i++, next += strlen(next) + 1)
            text[i] = (char *)next;
        if (perform_one(&step, text, bytes) < 0) {
            int error = errno;
            const char *message = describe(&step, text);
            errno = error;
            return message;
        }
        list = bytes + step.length;
    }
    return NULL;
}
