/* Pid 1 of a slot: builds the slot around itself by the steps it is given (steps.c), then starts commands, reaps
 * processes and kills process trees. It is native code to stay small: an idle slot takes a few dozen kilobytes instead
 * of megabytes, and none of the server's memory is copied when a slot is made.
 *
 * Descriptor 3 is the control socket, a SOCK_SEQPACKET; protocol/init_messages.py describes orders and reports. An
 * order may bring a second such socket, the line. Reports on a command go to the socket from which its order came, and
 * each side has its own names for the commands that it starts. Run as `init --version`, it exits with 100 + the version
 * of those structs, which shows the server that the program runs here.
 *
 * It uses no library: it is linked statically and may run over any root file system.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "steps.h"

enum { VERSION = 7, ANSWER = 100 };
enum { CONTROL = 3, LIST = 5, MAX_DATAGRAM = 96 << 10, MAX_FDS = 8, KILL_PATIENCE_S = 2 };
enum { ORDER_SPAWN = 1, ORDER_KILL, ORDER_SIGNAL, ORDER_LONG, ORDER_LINE };
enum { REPORT_READY = 1, REPORT_FAILED, REPORT_EXIT, REPORT_NOT_STARTED, REPORT_KILLED, REPORT_STARTED };
enum { FLAG_TERMINAL = 1, FLAG_ANNOUNCE = 2, FLAG_SPARE = 1, FLAG_AT_END = 2 };

struct order {
    uint8_t kind, flags;
    uint16_t places;
    uint32_t command;
    uint16_t arguments, variables;
};

struct report {
    uint8_t kind, flag;
    uint16_t zero;
    uint32_t command;
    int32_t value;
    uint32_t zero2;
    int64_t cpu_us, max_rss_bytes;
};

_Static_assert(sizeof(struct order) == 12, "as in init_messages.py");
_Static_assert(sizeof(struct report) == 32, "as in init_messages.py");

/* ---- Commands that run: their main process and when it was started, in clock ticks since boot. */

/* A time in ticks since boot, and the last pid that had been assigned by then; zeros mean the beginning. */
struct moment {
    int64_t ticks, pid;
};

struct command {
    pid_t pid;
    uint32_t name;
    unsigned long long started;
    int asker; /* the socket from which its order came */
    int at_end; /* whether the rest of its tree, if younger than a moment, is killed when its main process ends */
    struct moment after;
};

static struct command *commands;
static size_t command_count, command_room;

static void remember(struct command command) {
    if (command_count == command_room) {
        size_t room = command_room ? 2 * command_room : 16;
        struct command *grown = realloc(commands, room * sizeof *commands);
        if (!grown)
            _exit(1);
        commands = grown;
        command_room = room;
    }
    commands[command_count++] = command;
}

static struct command *find(pid_t pid) {
    for (size_t i = 0; i < command_count; i++)
        if (commands[i].pid == pid)
            return &commands[i];
    return NULL;
}

/* ---- Reports. */

static void report_with(int asker, struct report report, int fd) {
    char ancillary[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec body = {&report, sizeof report};
    struct msghdr message = {.msg_iov = &body, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = ancillary;
        message.msg_controllen = sizeof ancillary;
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(head), &fd, sizeof fd);
    }
    while (sendmsg(asker, &message, MSG_NOSIGNAL) < 0 && errno == EINTR)
        ;
}

static void report(int asker, struct report report) { report_with(asker, report, -1); }

static void report_failure(const char *what, int error) {
    char text[768];
    int length = snprintf(text, sizeof text, "%s: %s", what, strerror(error));
    struct report report = {.kind = REPORT_FAILED, .value = error};
    struct iovec body[] = {{&report, sizeof report}, {text, length}};
    struct msghdr message = {.msg_iov = body, .msg_iovlen = 2};
    sendmsg(CONTROL, &message, MSG_NOSIGNAL);
}

static void kill_rest(struct command ended);

static void reap(void) {
    int status;
    struct rusage usage;
    pid_t pid;
    while ((pid = wait4(-1, &status, WNOHANG, &usage)) > 0) {
        struct command *command = find(pid);
        if (!command)
            continue;
        report(command->asker, (struct report){
            .kind = REPORT_EXIT,
            .command = command->name,
            .value = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status),
            .cpu_us = (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000LL + usage.ru_utime.tv_usec
                      + usage.ru_stime.tv_usec,
            .max_rss_bytes = (int64_t)usage.ru_maxrss << 10,
        });
        struct command ended = *command;
        *command = commands[--command_count];
        if (ended.at_end)
            kill_rest(ended);
    }
}

/* ---- Starting. */

struct start {
    const struct order *order;
    const uint8_t *places;
    const char *cwd;
    char **argv, **env;
    int *fds;
    volatile int error, in_cwd; /* written by the child, which shares this memory until it executes the program */
};

/* Executes the program, looked up in the command's own PATH as a shell would. Returns the errno if that fails. */
static int execute(struct start *start) {
    const char *program = start->argv[0], *path = "";
    if (strchr(program, '/')) {
        execve(program, start->argv, start->env);
        return errno;
    }
    for (char **variable = start->env; *variable; variable++)
        if (!strncmp(*variable, "PATH=", 5))
            path = *variable + 5;
    int error = ENOENT;
    for (;;) {
        char candidate[4096];
        struct stat status;
        const char *end = strchrnul(path, ':');
        int length = snprintf(candidate, sizeof candidate, "%.*s/%s", end > path ? (int)(end - path) : 1,
                              end > path ? path : ".", program);
        if (length < (int)sizeof candidate && stat(candidate, &status) == 0 && S_ISREG(status.st_mode)) {
            if (access(candidate, X_OK) == 0) {
                execve(candidate, start->argv, start->env);
                return errno;
            }
            error = EACCES;
        }
        if (!*end)
            return error;
        path = end + 1;
    }
}

/* Runs in the child between vfork and exec, so it makes only system calls. A place above the control socket may have
 * the number of a descriptor that is still needed; if there is such a place, all descriptors are moved above it first. */
static void become(struct start *start) {
    int highest = 0;
    if (join_command_groups() < 0)
        goto failed;
    setsid();
    for (int i = 0; i < start->order->places; i++)
        highest = start->places[2 * i + 1] > highest ? start->places[2 * i + 1] : highest;
    for (int i = 0; highest > CONTROL && i < MAX_FDS && start->fds[i] >= 0; i++)
        if ((start->fds[i] = fcntl(start->fds[i], F_DUPFD_CLOEXEC, highest + 1)) < 0)
            goto failed;
    for (int i = 0; i < start->order->places; i++)
        if (dup2(start->fds[start->places[2 * i]], start->places[2 * i + 1]) < 0)
            goto failed;
    if (start->order->flags & FLAG_TERMINAL)
        ioctl(0, TIOCSCTTY, 0);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (chdir(start->cwd) < 0) {
        start->in_cwd = 1;
        goto failed;
    }
    start->error = execute(start);
    _exit(127);
failed:
    start->error = errno;
    _exit(127);
}

/* Parses the order and starts the command; `data` ends with a NUL. */
static void spawn(char *data, size_t size, int *fds, int asker) {
    const struct order *order = (const struct order *)data;
    struct start start = {.order = order, .places = (uint8_t *)data + sizeof *order, .fds = fds};
    char **strings = malloc((order->arguments + order->variables + 3) * sizeof *strings), **next = strings;
    char *text = data + sizeof *order + 2 * order->places, *end = data + size;
    if (!strings)
        _exit(1);
    start.cwd = text;
    for (int i = 0; i <= order->arguments + order->variables && text < end; i++, text += strlen(text) + 1) {
        if (i == 1)
            start.argv = next;
        if (i == order->arguments + 1) {
            *next++ = NULL;
            start.env = next;
        }
        if (i)
            *next++ = text;
    }
    if (!start.env) {
        *next++ = NULL;
        start.env = next;
    }
    *next = NULL;

    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now);
    long tick = sysconf(_SC_CLK_TCK);
    struct command command = {.name = order->command, .asker = asker};
    command.started = (unsigned long long)now.tv_sec * tick + now.tv_nsec / (1000000000L / tick);
    command.pid = vfork();
    if (command.pid == 0)
        become(&start);
    if (command.pid < 0)
        start.error = errno;
    if (start.error)
        report(asker, (struct report){
            .kind = REPORT_NOT_STARTED, .command = order->command, .value = start.error, .flag = start.in_cwd});
    else
        remember(command);
    if (!start.error && order->flags & FLAG_ANNOUNCE)
        report(asker, (struct report){.kind = REPORT_STARTED, .command = order->command, .value = command.pid});
    free(strings);
}

/* ---- Killing what a command has started, and nothing else; process_tree.py describes the rules. */

struct process {
    pid_t pid, parent, session;
    unsigned long long started;
    int zombie;
    char side; /* 'm' a member of the tree, 'f' foreign, 0 not known yet */
};

static struct process *table;
static size_t table_size, table_room;

static int read_process(const char *name, struct process *process) {
    char path[64], text[1024], state, *rest;
    snprintf(path, sizeof path, "/proc/%.20s/stat", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0)
        return 0;
    text[size] = 0;
    *process = (struct process){.pid = atoi(name)};
    rest = strrchr(text, ')'); /* the name before it can contain anything */
    int threads;
    if (!rest || sscanf(rest + 1, " %c %d %*d %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %d %*s %llu", &state,
                        &process->parent, &process->session, &threads, &process->started) != 5)
        return 0;
    process->zombie = (state == 'Z' || state == 'X') && threads < 2; /* else only the main thread has ended */
    return 1;
}

static void list_processes(void) {
    DIR *folder = opendir("/proc");
    struct dirent *entry;
    table_size = 0;
    if (!folder)
        return;
    while ((entry = readdir(folder))) {
        if (entry->d_name[0] < '0' || entry->d_name[0] > '9' || !strcmp(entry->d_name, "1"))
            continue;
        if (table_size == table_room) {
            size_t room = table_room ? 2 * table_room : 64;
            struct process *grown = realloc(table, room * sizeof *table);
            if (!grown)
                break;
            table = grown;
            table_room = room;
        }
        table_size += read_process(entry->d_name, &table[table_size]) && !table[table_size].zombie;
    }
    closedir(folder);
}

static int younger(const struct process *process, struct moment than) {
    return (int64_t)process->started > than.ticks
           || ((int64_t)process->started == than.ticks && process->pid > than.pid);
}

/* Marks every living process, and returns the number of processes to kill, which are those of the command. Processes
 * that started up to the moment `after` are spared, with their descendants; with `spare`, so is the main process. */
static size_t mark_tree(struct command command, struct moment after, int spare) {
    size_t members = 0;
    int always = !after.ticks;
    struct moment begin = always ? (struct moment){(int64_t)command.started, command.pid} : after;
    for (size_t i = 0; i < table_size; i++) {
        struct process *process = &table[i];
        struct command *leader = find(process->session);
        if (process->pid == command.pid || (process->session == command.pid && always))
            process->side = 'm';
        else if (!younger(process, after))
            process->side = 'f';
        else if ((leader && leader->pid != command.pid) || find(process->pid))
            process->side = 'f';
        else if (process->parent == 1)
            process->side = younger(process, begin) ? 'm' : 'f';
    }
    for (int changed = 1; changed;) {
        changed = 0;
        for (size_t i = 0; i < table_size; i++)
            for (size_t k = 0; !table[i].side && k < table_size; k++)
                if (table[k].pid == table[i].parent && table[k].side == 'm')
                    table[i].side = 'm', changed = 1;
    }
    for (size_t i = 0; i < table_size; i++) {
        if (table[i].pid == command.pid && spare)
            table[i].side = 'f';
        members += table[i].side == 'm';
    }
    return members;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

/* Kills until no process of the command lives. Returns 1 if it had to kill everything in the slot for that. */
static int kill_tree(struct command command, struct moment after, int spare) {
    double deadline = seconds() + KILL_PATIENCE_S;
    while (seconds() < deadline) {
        list_processes();
        if (!mark_tree(command, after, spare))
            return 0;
        for (size_t i = 0; i < table_size; i++)
            if (table[i].side == 'm')
                kill(table[i].pid, SIGKILL);
        nanosleep(&(struct timespec){.tv_nsec = 300000}, NULL); /* the kernel tears down the killed processes */
        reap();
    }
    kill(-1, SIGKILL);
    return 1;
}

/* Kills the rest of a command whose main process has ended and has been reported. */
static void kill_rest(struct command ended) {
    int swept = kill_tree(ended, ended.after, 1);
    report(ended.asker, (struct report){.kind = REPORT_KILLED, .command = ended.name, .flag = swept});
}

static void kill_command(uint32_t name, struct moment after, int flags, int asker) {
    int swept = 0;
    for (size_t i = 0; i < command_count; i++)
        if (commands[i].name == name && commands[i].asker == asker) {
            commands[i].at_end = !!(flags & FLAG_AT_END);
            commands[i].after = after;
            if (commands[i].at_end)
                return;
            swept = kill_tree(commands[i], after, flags & FLAG_SPARE);
            break;
        }
    reap();
    report(asker, (struct report){.kind = REPORT_KILLED, .command = name, .flag = swept});
}

static void signal_command(uint32_t name, int number, int asker) {
    for (size_t i = 0; i < command_count; i++)
        if (commands[i].name == name && commands[i].asker == asker)
            kill(-commands[i].pid, number);
}

/* ---- The loop. */

static int line = -1; /* the second socket for orders; -1 if there is none */

/* The moment in a KILL, if it has one. */
static struct moment moment(const char *data, size_t size) {
    struct moment after = {0, 0};
    if (size >= sizeof(struct order) + sizeof after)
        memcpy(&after, data + sizeof(struct order), sizeof after);
    return after;
}

static void obey(char *data, size_t size, int *fds, int asker) {
    const struct order *order = (const struct order *)data;
    if (order->kind == ORDER_SPAWN)
        spawn(data, size, fds, asker);
    else if (order->kind == ORDER_KILL)
        kill_command(order->command, moment(data, size), order->flags, asker);
    else if (order->kind == ORDER_SIGNAL)
        signal_command(order->command, order->flags, asker);
    else if (order->kind == ORDER_LINE && line < 0)
        line = fcntl(fds[0], F_DUPFD_CLOEXEC, CONTROL + 1);
}

/* Obeys an order in a memory file. The order is copied to a longer mapping, so that it ends with a NUL. */
static void obey_long(int *fds, int asker) {
    struct stat status;
    if (fstat(fds[0], &status) < 0)
        return;
    size_t size = status.st_size;
    char *data = mmap(NULL, size + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        _exit(1);
    for (size_t done = 0; done < size;) {
        ssize_t count = pread(fds[0], data + done, size - done, done);
        if (count <= 0)
            _exit(1);
        done += count;
    }
    obey(data, size, fds + 1, asker);
    munmap(data, size + 1);
}

/* Receives and obeys one order; returns 0 if the other side has closed the socket. */
static int take(int asker) {
    static _Alignas(struct order) char data[MAX_DATAGRAM + 4096];
    char ancillary[CMSG_SPACE(sizeof(int) * MAX_FDS)];
    int fds[MAX_FDS + 1], count = 0;
    struct iovec body = {data, sizeof data - 1};
    struct msghdr message = {
        .msg_iov = &body, .msg_iovlen = 1, .msg_control = ancillary, .msg_controllen = sizeof ancillary};
    ssize_t size = recvmsg(asker, &message, MSG_CMSG_CLOEXEC);
    if (size < (ssize_t)sizeof(struct order))
        return size < 0 && errno == EINTR;
    data[size] = 0;
    for (struct cmsghdr *head = CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head))
        if (head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS) {
            count = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(fds, CMSG_DATA(head), count * sizeof(int));
        }
    for (int i = count; i <= MAX_FDS; i++)
        fds[i] = -1;
    int received[MAX_FDS];
    memcpy(received, fds, sizeof received); /* the child, which shares this memory, changes `fds` */
    if (((struct order *)data)->kind == ORDER_LONG)
        obey_long(fds, asker);
    else
        obey(data, size, fds, asker);
    for (int i = 0; i < count; i++)
        close(received[i]);
    return 1;
}

/* Performs the steps in the file at LIST and closes the descriptors that they needed. */
static int build(void) {
    struct stat status;
    const char *failed = "cannot read the steps";
    if (fstat(LIST, &status) == 0 && status.st_size > 0) {
        size_t size = status.st_size;
        void *list = mmap(NULL, size, PROT_READ, MAP_PRIVATE, LIST, 0);
        if (list != MAP_FAILED) {
            failed = perform(list, size);
            int error = errno;
            munmap(list, size);
            errno = error;
        }
    }
    if (failed) {
        report_failure(failed, errno);
        return -1;
    }
    int free = keep_command_groups(CONTROL + 1);
    return free < 0 ? -1 : syscall(SYS_close_range, free, ~0u, 0);
}

int main(int count, char **arguments) {
    if (count > 1 && !strcmp(arguments[1], "--version"))
        return ANSWER + VERSION;
    if (fcntl(CONTROL, F_SETFD, FD_CLOEXEC) < 0) /* no command may inherit it */
        return 1;
    prctl(PR_SET_NAME, "slot-init", 0, 0, 0);
    if (count > 1 && !strcmp(arguments[1], "--build") && build() < 0)
        return 1;
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    for (int number = 1; number < 32; number++) /* commands inherit this; the kernel spares pid 1 the default action */
        signal(number, SIG_DFL);
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigprocmask(SIG_BLOCK, &mask, NULL);
    int children = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK), root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (children < 0 || root < 0) {
        report_failure("cannot begin", errno);
        return 1;
    }
    report_with(CONTROL, (struct report){.kind = REPORT_READY}, root);
    close(root);
    for (;;) {
        struct pollfd watched[] = {{CONTROL, POLLIN, 0}, {children, POLLIN, 0}, {line, POLLIN, 0}}; /* -1: no line */
        if (poll(watched, 3, -1) < 0)
            continue;
        if (watched[1].revents) {
            struct signalfd_siginfo gone[2];
            (void)!read(children, gone, sizeof gone); /* the signal is pending once, however many have ended */
            reap(); /* then sleep, because the receiver of a report may be waiting for this processor */
        }
        if (watched[2].revents && !take(line)) {
            close(line);
            line = -1;
        }
        if (watched[0].revents && !take(CONTROL))
            return 0;
    }
}
