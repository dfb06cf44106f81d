/* An emulated CUDA driver: libcuda.so.1 with no more than the primary contexts of a process.
 *
 *     cc -shared -fPIC -O1 -Wall -Wextra -Werror -o DIR/libcuda.so.1 cuda.c -ldl
 *
 * It is for tests of who makes contexts.  The devices are as many as CUDA_VISIBLE_DEVICES has entries, else as
 * EMULATED_CUDA says (default 1); the UUID of device N is sixteen bytes of N.  As in the real one, every call before cuInit
 * gives NOT_INITIALIZED, and a primary context lives while it is retained.  Each call that initialises, or makes one, adds a line "PID FUNCTION" to the file that
 * EMULATED_CUDA_LOG names, with one write, so that the processes of a job may share it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NOT_FOUND = 500, MAX_DEVICES = 16 };

typedef int CUresult;
typedef int CUdevice;

static int initialised;
static int retained[MAX_DEVICES];
static __thread int *current;

static void tell(const char *function)
{
    const char *path = getenv("EMULATED_CUDA_LOG");
    int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
    if (file < 0) return;
    char line[96];
    int length = snprintf(line, sizeof line, "%d %s\n", (int)getpid(), function);
    if (write(file, line, (size_t)length) != length) perror("emulated CUDA");
    close(file);
}

static int count(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES"), *said = getenv("EMULATED_CUDA");
    int number = said ? atoi(said) : 1;
    if (visible) {
        number = *visible != '\0';
        for (const char *at = visible; *at; at++) number += *at == ',';
    }
    return number < MAX_DEVICES ? number : MAX_DEVICES;
}

#define CHECK(device)                                                     \
    do {                                                                  \
        if (!initialised) return NOT_INITIALIZED;                         \
        if ((device) < 0 || (device) >= count()) return INVALID_DEVICE;   \
    } while (0)

CUresult cuInit(unsigned flags)
{
    (void)flags;
    tell("cuInit");
    initialised = 1;
    return SUCCESS;
}

CUresult cuDriverGetVersion(int *version)
{
    *version = 13000;
    return SUCCESS;
}

CUresult cuDeviceGetCount(int *number)
{
    if (!initialised) return NOT_INITIALIZED;
    *number = count();
    return SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    CHECK(ordinal);
    *device = ordinal;
    return SUCCESS;
}

CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device)
{
    CHECK(device);
    memset(uuid, device, 16);
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(void **context, CUdevice device)
{
    CHECK(device);
    if (!__atomic_fetch_add(&retained[device], 1, __ATOMIC_SEQ_CST)) tell("cuDevicePrimaryCtxRetain");
    *context = &retained[device];
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    CHECK(device);
    __atomic_fetch_sub(&retained[device], 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

CUresult cuCtxSetCurrent(void *context)
{
    if (!initialised) return NOT_INITIALIZED;
    current = context;
    return SUCCESS;
}

CUresult cuCtxGetCurrent(void **context)
{
    if (!initialised) return NOT_INITIALIZED;
    *context = current;
    return SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    if (!initialised) return NOT_INITIALIZED;
    if (!current) return INVALID_CONTEXT;
    *device = (CUdevice)(current - retained);
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    CHECK(device);
    *flags = 0;
    *active = retained[device] > 0;
    return SUCCESS;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    (void)version;
    (void)flags;
    char newer[96];
    if (!symbol || !function) return INVALID_VALUE;
    snprintf(newer, sizeof newer, "%s_v2", symbol);
    Dl_info self;
    void *library = dladdr((void *)cuInit, &self) ? dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    *function = library ? dlsym(library, newer) : NULL;
    if (library && !*function) *function = dlsym(library, symbol);
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}
