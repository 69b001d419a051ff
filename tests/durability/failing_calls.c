/* Fails calls of the C library on files of one folder: what SQLite does below Python. Preloaded by
 * test_sqlite_faults.py, which arms it through the functions at the end. One thread. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#define MOST 4096
static char folder[1024];
static char ours[MOST];
static long calls, allowed = -1;
static int number, sticks, shorter;

/* Whether this call, of which there were `calls`, fails. */
static int fails(void) {
    if (allowed < 0) return 0;
    long at = calls++;
    return at == allowed || (sticks && at > allowed);
}
static int is_ours(int fd) { return fd >= 0 && fd < MOST && ours[fd]; }
static int below(const char *path) { return folder[0] && path && strncmp(path, folder, strlen(folder)) == 0; }

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL_OR(call)                      \
    do {                                   \
        if (fails()) {                     \
            errno = number;                \
            return (__typeof__(call))(-1); \
        }                                  \
        return call;                       \
    } while (0)

#define OPEN(name)                                   \
    int name(const char *path, int flags, ...) {     \
        REAL(name);                                  \
        va_list more;                                \
        va_start(more, flags);                       \
        mode_t mode = va_arg(more, mode_t);          \
        va_end(more);                                \
        if (below(path) && fails()) {                \
            errno = number;                          \
            return -1;                               \
        }                                            \
        int fd = real(path, flags, mode);            \
        if (fd >= 0 && fd < MOST) ours[fd] = below(path); \
        return fd;                                   \
    }
OPEN(open)
OPEN(open64)

#define WRITE(name, offset_type)                                              \
    ssize_t name(int fd, const void *data, size_t count, offset_type offset) { \
        REAL(name);                                                           \
        if (is_ours(fd) && fails()) {                                         \
            if (shorter && count > 1) return real(fd, data, count / 2, offset); \
            errno = number;                                                   \
            return -1;                                                        \
        }                                                                     \
        return real(fd, data, count, offset);                                 \
    }
WRITE(pwrite, off_t)
WRITE(pwrite64, off64_t)

ssize_t write(int fd, const void *data, size_t count) {
    REAL(write);
    if (is_ours(fd)) FAIL_OR(real(fd, data, count));
    return real(fd, data, count);
}
ssize_t read(int fd, void *data, size_t count) {
    REAL(read);
    if (is_ours(fd)) FAIL_OR(real(fd, data, count));
    return real(fd, data, count);
}
ssize_t pread(int fd, void *data, size_t count, off_t offset) {
    REAL(pread);
    if (is_ours(fd)) FAIL_OR(real(fd, data, count, offset));
    return real(fd, data, count, offset);
}
ssize_t pread64(int fd, void *data, size_t count, off64_t offset) {
    REAL(pread64);
    if (is_ours(fd)) FAIL_OR(real(fd, data, count, offset));
    return real(fd, data, count, offset);
}
int fsync(int fd) {
    REAL(fsync);
    if (is_ours(fd)) FAIL_OR(real(fd));
    return real(fd);
}
int fdatasync(int fd) {
    REAL(fdatasync);
    if (is_ours(fd)) FAIL_OR(real(fd));
    return real(fd);
}
int ftruncate(int fd, off_t length) {
    REAL(ftruncate);
    if (is_ours(fd)) FAIL_OR(real(fd, length));
    return real(fd, length);
}
int ftruncate64(int fd, off64_t length) {
    REAL(ftruncate64);
    if (is_ours(fd)) FAIL_OR(real(fd, length));
    return real(fd, length);
}
int unlink(const char *path) {
    REAL(unlink);
    if (below(path)) FAIL_OR(real(path));
    return real(path);
}
int rename(const char *path, const char *to) {
    REAL(rename);
    if (below(path)) FAIL_OR(real(path, to));
    return real(path, to);
}
void *mmap(void *at, size_t length, int protection, int flags, int fd, off_t offset) {
    REAL(mmap);
    if (is_ours(fd) && fails()) {
        errno = number;
        return MAP_FAILED;
    }
    return real(at, length, protection, flags, fd, offset);
}
void *mmap64(void *at, size_t length, int protection, int flags, int fd, off64_t offset) {
    REAL(mmap64);
    if (is_ours(fd) && fails()) {
        errno = number;
        return MAP_FAILED;
    }
    return real(at, length, protection, flags, fd, offset);
}

/* `after` calls on files below `path` pass; number 0: a write takes half of its bytes. */
void faults_arm(const char *path, long after, int error, int for_good) {
    strncpy(folder, path, sizeof folder - 1);
    calls = 0, allowed = after, number = error ? error : EIO, shorter = !error, sticks = for_good;
}
long faults_disarm(void) {
    allowed = -1;
    return calls;
}
