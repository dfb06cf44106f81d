/* An emulated NVML: libnvidia-ml.so.1 for machines without a GPU.
 *
 *     cc -shared -fPIC -O1 -Wall -Wextra -Werror -o DIR/libnvidia-ml.so.1 nvml.c
 *
 * With DIR first on LD_LIBRARY_PATH, pynvml (and so distributed and dask-cuda, both unmodified) sees the GPUs that the
 * environment variable EMULATED_NVML describes.  nvml.py writes that variable; this is its grammar:
 *
 *     variable    = "@" path-of-a-file-with-a-description | description
 *     description = host { ";" host }         a new line is a ";"; what starts with "#" is a comment
 *     host        = [ pattern ":" ] [ item { "|" item } ]
 *     item        = field { "," field }       blanks around every separator are ignored
 *     field       = key [ "=" value ]         a value holds no , | ; and no new line; a list is joined by "+"
 *
 * The first host whose pattern (fnmatch) fits gethostname(), in full or up to its first dot, is taken; without a pattern
 * it fits every host.  The first field of an item says what the item is:
 *
 *     gpu[=N]  N alike GPUs (default 1).  With them, in any order:
 *         uuid=GPU-...     (N = 1 only; default: made from host name and index, the same in every process)
 *         name=TEXT        memory=BYTES (K, M, G, T are binary units; "none": NOT_SUPPORTED)
 *         used=BYTES       default: the sum of the processes
 *         cores=0-3+8-11   the cores near it (default: all; "none": NOT_SUPPORTED)      node=N   NUMA node (default 0)
 *         pci=0000:3b:00.0 (N = 1 only)      utilization=PERCENT      temperature=C      ecc=COUNT
 *         power=W    throttle=BITS    pcie=KB    nvlink=BYTES      per second, sent and as much received (default: NOT_SUPPORTED)
 *         processes=PID:BYTES+PID:BYTES
 *         lost             every call on it gives GPU_IS_LOST; nvmlDeviceGetCount still counts it
 *         fail=FUNCTION:CODE+FUNCTION:CODE   those calls on it fail; FUNCTION without _v2, _v3; "*" is all of them
 *     mig      a MIG instance on the GPU(s) of the item before, with uuid=MIG-..., name, memory, used, processes, lost and
 *              fail as above, at the next place on its parent. A GPU without instances does not support MIG
 *     init-fail=CODE       nvmlInit gives CODE
 *     only=1+3             device isolation, as by a cgroup: only these GPUs exist, and are indexed from 0
 *     files=PATH           GPU i has the device file PATHi: the GPUs whose file this process is not permitted to open, say by its
 *                          device cgroup, are isolated from it. What else comes of opening it does not matter.
 *     driver=TEXT          its version
 *
 * CODE is a number or a name without NVML_ERROR_, such as GPU_IS_LOST.  EMULATED_NVML_ONLY=1,3 isolates further (one
 * rank of a host, say); its numbers too are places in the whole list.  Variable unset, or no host that fits: nvmlInit
 * gives DRIVER_NOT_LOADED.  An empty variable or host: a driver without GPUs.  A description with a mistake: one line
 * on standard error, and nvmlInit gives INVALID_ARGUMENT, which nothing above it takes for "no GPU here".
 *
 * The variables are read at every nvmlInit.  A new text makes a new table; the old one is kept, so handles stay valid.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_GPUS = 64, MAX_MIG = 8, MAX_PROCESSES = 32, MAX_FAILURES = 16, CPU_WORDS = 64, TEXT = 96 };
enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25
};

typedef int nvmlReturn_t;
typedef unsigned long long ull;
typedef enum { MIG_UNSUPPORTED, MIG_ON } MigMode;

/* Layouts of nvml.h, as pynvml's ctypes structures have them. */
typedef struct { ull total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; ull total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned pid; ull usedGpuMemory; unsigned gpuInstanceId, computeInstanceId; } nvmlProcessInfo_t;
typedef struct { unsigned version; int sensor; int temperature; } nvmlTemperature_t;
typedef union { double d; ull number; } nvmlValue_t;
typedef struct {
    unsigned fieldId, scopeId;
    int64_t timestamp, latencyUsec;
    int valueType;
    nvmlReturn_t nvmlReturn;
    nvmlValue_t value;
} nvmlFieldValue_t;
typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct { char function[TEXT]; int code; } Failure;
typedef struct { unsigned domain, bus, device; } Pci;
typedef struct Device {
    struct Device *parent; /* NULL: a GPU, else this is a MIG instance of it */
    struct Device *mig[MAX_MIG];
    unsigned index, minor, node, utilization, temperature, power, pcie;
    ull throttle, nvlink;
    bool has_power, has_throttle, has_pcie, has_nvlink;
    char uuid[TEXT], name[TEXT];
    Pci pci;
    ull total, used, ecc;
    bool no_memory, no_cores, used_given, pci_given, lost;
    uint64_t cores[CPU_WORDS];
    MigMode mig_mode;
    unsigned n_processes, n_failures;
    nvmlProcessInfo_t processes[MAX_PROCESSES];
    Failure failures[MAX_FAILURES];
} Device;
typedef struct {
    Device *gpus[MAX_GPUS], *visible[MAX_GPUS];
    unsigned count, n_visible;
    bool hidden[MAX_GPUS];
    int init_fail, cuda;
    char driver[TEXT], *source; /* source: what this table was made from */
} Host;

static const struct { int code; const char *name, *text; } ERRORS[] = {
    {0, "SUCCESS", "Success"}, {1, "UNINITIALIZED", "Uninitialized"}, {2, "INVALID_ARGUMENT", "Invalid Argument"},
    {3, "NOT_SUPPORTED", "Not Supported"}, {4, "NO_PERMISSION", "Insufficient Permissions"},
    {6, "NOT_FOUND", "Not Found"}, {7, "INSUFFICIENT_SIZE", "Insufficient Size"},
    {8, "INSUFFICIENT_POWER", "Insufficient External Power"}, {9, "DRIVER_NOT_LOADED", "Driver Not Loaded"},
    {10, "TIMEOUT", "Timeout"}, {11, "IRQ_ISSUE", "Interrupt Request Issue"},
    {12, "LIBRARY_NOT_FOUND", "NVML Shared Library Not Found"}, {13, "FUNCTION_NOT_FOUND", "Function Not Found"},
    {14, "CORRUPTED_INFOROM", "Corrupted infoROM"}, {15, "GPU_IS_LOST", "GPU is lost"},
    {16, "RESET_REQUIRED", "GPU requires reset"}, {17, "OPERATING_SYSTEM", "GPU access blocked by the operating system"},
    {18, "LIB_RM_VERSION_MISMATCH", "Driver/library version mismatch"}, {19, "IN_USE", "In use by another client"},
    {20, "MEMORY", "Insufficient Memory"}, {21, "NO_DATA", "No data"}, {23, "INSUFFICIENT_RESOURCES", "Insufficient Resources"},
    {25, "ARGUMENT_VERSION_MISMATCH", "Argument version mismatch"}, {27, "NOT_READY", "Not Ready"},
    {28, "GPU_NOT_FOUND", "GPU not found"}, {29, "INVALID_STATE", "Invalid state"}, {999, "UNKNOWN", "Unknown Error"},
};
enum { N_ERRORS = sizeof ERRORS / sizeof ERRORS[0] };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Host *host;          /* the table in force; NULL before the first good nvmlInit */
static unsigned references; /* nvmlInit calls without their nvmlShutdown */

/* ---- reading the description -------------------------------------------------------------------------------- */

static bool bad(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("emulated NVML: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    return false;
}

static char *trim(char *text)
{
    while (isspace((unsigned char)*text)) text++;
    char *end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1])) *--end = '\0';
    return text;
}

/* The next part of *rest up to one of the separators, trimmed; NULL at the end. */
static char *next(char **rest, const char *separators)
{
    char *part = strsep(rest, separators);
    return part ? trim(part) : NULL;
}

static bool set_text(char *target, const char *key, const char *value)
{
    if (strlen(value) >= TEXT) return bad("%s is longer than %d characters: '%s'", key, TEXT - 1, value);
    strcpy(target, value);
    return true;
}

static bool set_number(ull *target, const char *key, const char *value)
{
    char *end;
    ull shift = 0, number = strtoull(value, &end, 10);
    const char *units = "KMGT", *unit = *end ? strchr(units, *end) : NULL;
    if (unit) shift = 10 * (ull)(unit - units + 1), end++;
    if (!isdigit((unsigned char)*value) || *end) return bad("%s is no number: '%s'", key, value);
    *target = number << shift;
    return true;
}

static bool set_unsigned(unsigned *target, const char *key, const char *value)
{
    ull number;
    if (!set_number(&number, key, value)) return false;
    *target = (unsigned)number;
    return true;
}

static bool set_code(int *target, const char *value)
{
    unsigned number;
    for (int i = 0; i < N_ERRORS; i++)
        if (!strcmp(value, ERRORS[i].name)) return *target = ERRORS[i].code, true;
    if (!isdigit((unsigned char)*value)) return bad("there is no error NVML_ERROR_%s", value);
    if (!set_unsigned(&number, "the error code", value)) return false;
    return *target = (int)number, true;
}

/* "0-3+8" or "0-3,8" to bits of a set of `limit` numbers. */
static bool set_bits(uint64_t *bits, unsigned limit, const char *key, char *value)
{
    char *part;
    while ((part = next(&value, "+,"))) {
        unsigned first, last;
        char *dash = strchr(part, '-');
        if (dash) *dash++ = '\0';
        if (!set_unsigned(&first, key, part) || !set_unsigned(&last, key, dash ? dash : part)) return false;
        if (first > last || last >= limit) return bad("%s: %u-%u is not within 0-%d", key, first, last, (int)limit - 1);
        for (unsigned i = first; i <= last; i++) bits[i / 64] |= 1ULL << i % 64;
    }
    return true;
}

static bool set_pci(Pci *pci, const char *value)
{
    int length = 0;
    if (sscanf(value, "%8x:%2x:%2x.%*1x%n", &pci->domain, &pci->bus, &pci->device, &length) == 3 && length && !value[length])
        return true;
    return bad("pci is no bus id like 0000:3b:00.0: '%s'", value);
}

static bool set_processes(Device *device, char *value)
{
    char *part;
    for (device->n_processes = 0; (part = next(&value, "+")); device->n_processes++) {
        char *pid = strsep(&part, ":");
        if (device->n_processes == MAX_PROCESSES) return bad("more than %d processes", MAX_PROCESSES);
        nvmlProcessInfo_t *process = &device->processes[device->n_processes];
        process->gpuInstanceId = process->computeInstanceId = ~0U; /* "not in MIG mode", as the driver has it */
        if (!set_unsigned(&process->pid, "a pid", pid)) return false;
        if (!set_number(&process->usedGpuMemory, "a process' memory", part ? part : "0")) return false;
    }
    return true;
}

static bool set_failures(Device *device, char *value)
{
    char *part;
    while ((part = next(&value, "+"))) {
        char *function = strsep(&part, ":");
        if (!part) return bad("fail has no error code: '%s'", function);
        if (device->n_failures == MAX_FAILURES) return bad("more than %d failures", MAX_FAILURES);
        Failure *failure = &device->failures[device->n_failures++];
        if (!set_text(failure->function, "fail", function) || !set_code(&failure->code, part)) return false;
    }
    return true;
}

static bool set_field(Device *device, const char *key, char *value, bool single)
{
#define IS(name) (!strcmp(key, name))
    bool none = !strcmp(value, "none");
    if (IS("lost")) return device->lost = true;
    if (IS("uuid") && !single) return bad("uuid does not go with several GPUs: '%s'", value);
    if (IS("uuid")) return set_text(device->uuid, key, value);
    if (IS("name")) return set_text(device->name, key, value);
    if (IS("memory")) return (device->no_memory = none) || set_number(&device->total, key, value);
    if (IS("used")) return (device->used_given = true) && set_number(&device->used, key, value);
    if (IS("processes")) return set_processes(device, value);
    if (IS("fail")) return set_failures(device, value);
    if (device->parent) return bad("a MIG instance has no '%s'", key);
    if (IS("cores")) {
        memset(device->cores, 0, sizeof device->cores);
        return (device->no_cores = none) || set_bits(device->cores, CPU_WORDS * 64, key, value);
    }
    if (IS("pci") && !single) return bad("pci does not go with several GPUs: '%s'", value);
    if (IS("pci")) return (device->pci_given = true) && set_pci(&device->pci, value);
    if (IS("node")) return set_unsigned(&device->node, key, value);
    if (IS("utilization")) return set_unsigned(&device->utilization, key, value);
    if (IS("temperature")) return set_unsigned(&device->temperature, key, value);
    if (IS("power")) return (device->has_power = true) && set_unsigned(&device->power, key, value);
    if (IS("throttle")) return (device->has_throttle = true) && set_number(&device->throttle, key, value);
    if (IS("pcie")) return (device->has_pcie = true) && set_unsigned(&device->pcie, key, value);
    if (IS("nvlink")) return (device->has_nvlink = true) && set_number(&device->nvlink, key, value);
    if (IS("ecc")) return set_number(&device->ecc, key, value);
    return bad("a GPU has no '%s' with value '%s'", key, value);
}

static bool set_fields(Device *device, char *fields, bool single)
{
    char *field;
    while ((field = next(&fields, ","))) {
        char *key = next(&field, "=");
        if (!set_field(device, key, field ? trim(field) : "", single)) return false;
    }
    return true;
}

static Device *copy_of(const Device *original)
{
    Device *copy = malloc(sizeof *copy);
    if (copy) *copy = *original;
    return copy;
}

static bool add_gpus(Host *made, const char *count, char *fields)
{
    Device model = {.total = 16ULL << 30, .temperature = 40, .name = "Emulated GPU"};
    unsigned n = 1;
    if (*count && !set_unsigned(&n, "gpu", count)) return false;
    if (made->count + n > MAX_GPUS) return bad("more than %d GPUs", MAX_GPUS);
    long cores = sysconf(_SC_NPROCESSORS_CONF);
    for (long i = 0; i < cores && i < CPU_WORDS * 64; i++) model.cores[i / 64] |= 1ULL << i % 64;
    if (!set_fields(&model, fields, n == 1)) return false;
    for (; n > 0; n--) {
        model.index = made->count;
        model.minor = made->count;
        if (!model.pci_given) model.pci = (Pci){0, made->count + 1, 0};
        if (!(made->gpus[made->count] = copy_of(&model))) return bad("out of memory");
        made->count++;
    }
    return true;
}

static bool add_mig(Host *made, unsigned first, char *fields)
{
    if (first == made->count) return bad("a MIG instance comes before any GPU");
    for (unsigned i = first; i < made->count; i++) {
        Device *parent = made->gpus[i], model = {.parent = parent, .total = parent->total / 7};
        while (model.index < MAX_MIG && parent->mig[model.index]) model.index++;
        char *copy = fields ? strdup(fields) : NULL;
        bool good = set_fields(&model, copy, made->count - first == 1);
        free(copy);
        if (!good) return false;
        if (model.index >= MAX_MIG || parent->mig[model.index]) return bad("no place for MIG instance %u", model.index);
        if (!*model.name) snprintf(model.name, TEXT, "%.70s MIG %u", parent->name, model.index);
        for (unsigned j = 0; j < model.n_processes; j++)
            model.processes[j].gpuInstanceId = model.index + 1, model.processes[j].computeInstanceId = 0;
        if (!(parent->mig[model.index] = copy_of(&model))) return bad("out of memory");
        parent->mig_mode = MIG_ON;
    }
    return true;
}

static bool set_only(Host *made, char *value)
{
    uint64_t bits[1] = {0};
    if (*value && !set_bits(bits, made->count, "only", value)) return false;
    for (unsigned i = 0; i < made->count; i++)
        if (!(bits[0] >> i & 1)) made->hidden[i] = true;
    return true;
}

static bool set_files(Host *made, const char *prefix)
{
    char path[4096];
    for (unsigned i = 0; i < made->count; i++) {
        snprintf(path, sizeof path, "%s%u", prefix, i);
        int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
        if (file >= 0) close(file);
        else if (errno == ENOENT) return bad("no device file '%s'", path);
        else if (errno == EPERM || errno == EACCES) made->hidden[i] = true;
    }
    return true;
}

/* What is left to say once all is read: UUIDs and used memory that were not given. */
static void finish(Device *device, const char *name)
{
    uint64_t hash = 14695981039346656037ULL; /* FNV-1a: the same UUID in every process of a host, another on another host */
    char seed[400];
    snprintf(seed, sizeof seed, "%.250s/%u/%d", name, device->parent ? device->parent->index : device->index,
             device->parent ? (int)device->index : -1);
    for (const char *c = seed; *c; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211ULL;
    if (!*device->uuid)
        snprintf(device->uuid, TEXT, "%s-%08x-%04x-4000-8000-%012llx", device->parent ? "MIG" : "GPU", (unsigned)(hash >> 32),
                 (unsigned)(hash >> 16) & 0xffff, (ull)(hash * 0x9E3779B97F4A7C15ULL) >> 16);
    for (unsigned i = 0; i < device->n_processes && !device->used_given; i++)
        device->used += device->processes[i].usedGpuMemory;
    for (int i = 0; i < MAX_MIG; i++)
        if (device->mig[i]) {
            finish(device->mig[i], name);
            if (!device->used_given) device->used += device->mig[i]->used;
        }
}

static bool read_host(Host *made, char *items, const char *name, char *only_here)
{
    char *item, *only = NULL, *files = NULL;
    unsigned first = 0; /* of the GPUs that a MIG instance belongs to */
    while ((item = next(&items, "|"))) {
        char *head = next(&item, ","), *key = next(&head, "=");
        char *value = head ? trim(head) : "";
        bool good = true;
        if (IS("gpu")) first = made->count, good = add_gpus(made, value, item);
        else if (IS("mig")) good = add_mig(made, first, item);
        else if (item) good = bad("what comes after '%s' belongs in an item of its own: '%s'", key, item);
        else if (IS("init-fail")) good = set_code(&made->init_fail, value);
        else if (IS("driver")) good = set_text(made->driver, key, value);
        else if (IS("only")) only = value;
        else if (IS("files")) files = value;
        else if (*key) good = bad("an item starts with gpu, mig, init-fail, only, files or driver, not '%s'", key);
        if (!good) return false;
    }
    if ((only && !set_only(made, only)) || (only_here && !set_only(made, only_here))) return false;
    if (files && !set_files(made, files)) return false;
    for (unsigned i = 0; i < made->count; i++) {
        finish(made->gpus[i], name);
        if (!made->hidden[i]) made->visible[made->n_visible++] = made->gpus[i];
    }
    for (unsigned i = 0; i < made->n_visible; i++) made->visible[i]->index = i;
    return true;
}

/* The part of the description for the host of this name: NULL if there is none. */
static char *part_for(char *description, const char *name)
{
    char *part, shortened[256];
    snprintf(shortened, sizeof shortened, "%.*s", (int)strcspn(name, "."), name);
    description = trim(description);
    if (!*description) return description;
    while ((part = next(&description, ";\n"))) {
        size_t prefix = strcspn(part, ":=,|"); /* a colon after one of the others is part of a value */
        if (*part == '#' || !*part) continue;
        if (part[prefix] != ':') return part;
        part[prefix] = '\0';
        char *items = part + prefix + 1, *pattern = trim(part);
        if (!fnmatch(pattern, name, 0) || !fnmatch(pattern, shortened, 0)) return items;
    }
    return NULL;
}

static char *contents(const char *path)
{
    FILE *file = fopen(path, "r");
    char *text = NULL;
    size_t size = 0;
    if (!file) return bad("can't read the description '%s'", path), NULL;
    if (getdelim(&text, &size, '\0', file) < 0) text = (free(text), strdup("")); /* an empty file */
    fclose(file);
    return text;
}

static nvmlReturn_t load(void)
{
    const char *variable = getenv("EMULATED_NVML"), *only = getenv("EMULATED_NVML_ONLY");
    char name[256] = "", *source, *text, *part, *only_here = only ? strdup(only) : NULL;
    if (!variable) return DRIVER_NOT_LOADED;
    text = *variable == '@' ? contents(variable + 1) : strdup(variable);
    gethostname(name, sizeof name - 1);
    if (!text || asprintf(&source, "%s\n%s\n%s", name, only ? only : "-", text) < 0) return INVALID_ARGUMENT;
    if (host && !strcmp(host->source, source)) return SUCCESS; /* a few leaked bytes matter less than one more path */
    if (!(part = part_for(text, name))) return DRIVER_NOT_LOADED;
    Host *made = calloc(1, sizeof *made);
    if (!made) return INVALID_ARGUMENT;
    *made = (Host){.cuda = 13000, .driver = "580.65.06", .source = source};
    if (!read_host(made, part, name, only_here)) return INVALID_ARGUMENT;
    if (made->init_fail) return made->init_fail;
    host = made; /* the table before it is kept: its handles may be in use */
    return SUCCESS;
}

/* ---- the library -------------------------------------------------------------------------------------------- */

#define ALIAS(result, name, parameters, target) result name parameters __attribute__((alias(target)))

nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    pthread_mutex_lock(&lock);
    nvmlReturn_t result = load();
    if (result == SUCCESS) references++;
    pthread_mutex_unlock(&lock);
    return result;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
ALIAS(nvmlReturn_t, nvmlInit, (void), "nvmlInit_v2");

nvmlReturn_t nvmlShutdown(void)
{
    pthread_mutex_lock(&lock);
    nvmlReturn_t result = references ? SUCCESS : UNINITIALIZED;
    if (references) references--;
    pthread_mutex_unlock(&lock);
    return result;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    for (int i = 0; i < N_ERRORS; i++)
        if (ERRORS[i].code == result) return ERRORS[i].text;
    return "Unknown Error";
}

static nvmlReturn_t give_text(char *target, unsigned size, const char *text)
{
    if (!references) return UNINITIALIZED;
    if (!target) return INVALID_ARGUMENT;
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(target, text);
    return SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned size)
{
    return give_text(version, size, host ? host->driver : "");
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned size) { return give_text(version, size, "13.580.65.06"); }

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    if (!references) return UNINITIALIZED;
    *version = host->cuda;
    return SUCCESS;
}
ALIAS(nvmlReturn_t, nvmlSystemGetCudaDriverVersion, (int *), "nvmlSystemGetCudaDriverVersion_v2");

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    if (!references) return UNINITIALIZED;
    *count = host->n_visible;
    return SUCCESS;
}
ALIAS(nvmlReturn_t, nvmlDeviceGetCount, (unsigned *), "nvmlDeviceGetCount_v2");

/* What a call of this name on this device must fail with; every function on a device begins with it. */
static nvmlReturn_t trouble(const Device *device, const char *function)
{
    if (!references) return UNINITIALIZED;
    if (!device) return INVALID_ARGUMENT;
    if (device->lost || (device->parent && device->parent->lost)) return GPU_IS_LOST;
    for (unsigned i = 0; i < device->n_failures; i++) {
        const char *name = device->failures[i].function;
        size_t length = strlen(name);
        bool same = !strncmp(name, function, length) && (!function[length] || !strncmp(function + length, "_v", 2));
        if (same || !strcmp(name, "*")) return device->failures[i].code;
    }
    return SUCCESS;
}
#define CHECK(device) \
    do { \
        nvmlReturn_t found_ = trouble(device, __func__); \
        if (found_ != SUCCESS) return found_; \
    } while (0)

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device)
{
    if (!references) return UNINITIALIZED;
    if (!device || index >= host->n_visible) return INVALID_ARGUMENT;
    CHECK(host->visible[index]);
    *device = host->visible[index];
    return SUCCESS;
}
ALIAS(nvmlReturn_t, nvmlDeviceGetHandleByIndex, (unsigned, Device **), "nvmlDeviceGetHandleByIndex_v2");

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, Device **device)
{
    if (!references) return UNINITIALIZED;
    if (!uuid || !device) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < host->n_visible; i++) {
        Device *found = strcmp(uuid, host->visible[i]->uuid) ? NULL : host->visible[i];
        for (int j = 0; j < MAX_MIG; j++)
            if (host->visible[i]->mig[j] && !strcmp(uuid, host->visible[i]->mig[j]->uuid)) found = host->visible[i]->mig[j];
        if (!found) continue;
        CHECK(found);
        *device = found;
        return SUCCESS;
    }
    return NOT_FOUND; /* abbreviated UUIDs too: the driver wants them in full here */
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, Device **device)
{
    Pci wanted;
    if (!references) return UNINITIALIZED;
    if (!id || !device || sscanf(id, "%x:%x:%x", &wanted.domain, &wanted.bus, &wanted.device) != 3) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < host->n_visible; i++)
        if (!memcmp(&wanted, &host->visible[i]->pci, sizeof wanted)) {
            CHECK(host->visible[i]);
            *device = host->visible[i];
            return SUCCESS;
        }
    return NOT_FOUND;
}
ALIAS(nvmlReturn_t, nvmlDeviceGetHandleByPciBusId, (const char *, Device **), "nvmlDeviceGetHandleByPciBusId_v2");

nvmlReturn_t nvmlDeviceGetUUID(Device *device, char *uuid, unsigned size)
{
    CHECK(device);
    return give_text(uuid, size, device->uuid);
}

nvmlReturn_t nvmlDeviceGetName(Device *device, char *name, unsigned size)
{
    CHECK(device);
    return give_text(name, size, device->name);
}

/* A MIG instance gives its place on its parent, as the driver does. */
nvmlReturn_t nvmlDeviceGetIndex(Device *device, unsigned *index)
{
    CHECK(device);
    *index = device->index;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(Device *device, unsigned *minor)
{
    CHECK(device);
    if (device->parent) return INVALID_ARGUMENT;
    *minor = device->minor;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(Device *device, nvmlPciInfo_t *info)
{
    CHECK(device);
    const Pci *pci = device->parent ? &device->parent->pci : &device->pci;
    *info = (nvmlPciInfo_t){.domain = pci->domain, .bus = pci->bus, .device = pci->device, .pciDeviceId = 0x233010DE};
    snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
             pci->device & 0xff);
    snprintf(info->busId, sizeof info->busId, "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(Device *device, nvmlMemory_t *memory)
{
    CHECK(device);
    if (device->no_memory) return NOT_SUPPORTED;
    ull used = device->used < device->total ? device->used : device->total;
    *memory = (nvmlMemory_t){.total = device->total, .free = device->total - used, .used = used};
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(Device *device, nvmlMemory_v2_t *memory)
{
    nvmlMemory_t plain;
    CHECK(device);
    if (memory->version != (sizeof *memory | 2U << 24)) return ARGUMENT_VERSION_MISMATCH;
    if (device->no_memory) return NOT_SUPPORTED;
    nvmlDeviceGetMemoryInfo(device, &plain);
    *memory = (nvmlMemory_v2_t){.version = memory->version, .total = plain.total, .free = plain.free, .used = plain.used};
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCpuAffinity(Device *device, unsigned size, unsigned long *set)
{
    CHECK(device);
    const Device *gpu = device->parent ? device->parent : device;
    if (!set || !size) return INVALID_ARGUMENT;
    if (gpu->no_cores) return NOT_SUPPORTED;
    for (unsigned i = 0; i < size; i++) set[i] = i < CPU_WORDS ? gpu->cores[i] : 0;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(Device *device, unsigned size, unsigned long *set, unsigned scope)
{
    (void)scope;
    CHECK(device);
    return nvmlDeviceGetCpuAffinity(device, size, set);
}

nvmlReturn_t nvmlDeviceGetMemoryAffinity(Device *device, unsigned size, unsigned long *set, unsigned scope)
{
    (void)scope;
    CHECK(device);
    const Device *gpu = device->parent ? device->parent : device;
    if (!set || !size) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < size; i++) set[i] = gpu->node / 64 == i ? 1UL << gpu->node % 64 : 0;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending)
{
    CHECK(device);
    if (device->parent) return INVALID_ARGUMENT;
    if (device->mig_mode == MIG_UNSUPPORTED) return NOT_SUPPORTED;
    *current = *pending = device->mig_mode == MIG_ON;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count)
{
    CHECK(device);
    *count = device->parent || device->mig_mode == MIG_UNSUPPORTED ? 0 : MAX_MIG;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **mig)
{
    CHECK(device);
    if (device->parent || index >= MAX_MIG) return INVALID_ARGUMENT;
    if (device->mig_mode == MIG_UNSUPPORTED) return NOT_SUPPORTED;
    if (!device->mig[index]) return NOT_FOUND;
    CHECK(device->mig[index]);
    *mig = device->mig[index];
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(Device *device, unsigned *is_mig)
{
    CHECK(device);
    *is_mig = device->parent != NULL;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *mig, Device **device)
{
    CHECK(mig);
    if (!mig->parent) return INVALID_ARGUMENT;
    *device = mig->parent;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(Device *device, unsigned *id)
{
    CHECK(device);
    if (!device->parent) return INVALID_ARGUMENT;
    *id = device->index + 1;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(Device *device, unsigned *id)
{
    CHECK(device);
    if (!device->parent) return INVALID_ARGUMENT;
    *id = 0;
    return SUCCESS;
}

/* nvml.h: "On MIG-enabled GPUs, querying device utilization rates is not currently supported." */
nvmlReturn_t nvmlDeviceGetUtilizationRates(Device *device, nvmlUtilization_t *rates)
{
    CHECK(device);
    if (device->parent || device->mig_mode == MIG_ON) return NOT_SUPPORTED;
    unsigned memory = device->total ? (unsigned)(100.0 * (double)device->used / (double)device->total) : 0;
    *rates = (nvmlUtilization_t){.gpu = device->utilization, .memory = memory > 100 ? 100 : memory};
    return SUCCESS;
}

/* A GPU in MIG mode gives the processes of its instances as well. */
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, nvmlProcessInfo_t *processes)
{
    CHECK(device);
    unsigned room = *count, found = 0;
    for (int i = -1; i < MAX_MIG; i++) {
        const Device *part = i < 0 ? device : device->mig[i];
        for (unsigned j = 0; part && j < part->n_processes; j++, found++)
            if (processes && found < room) processes[found] = part->processes[j];
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}
ALIAS(nvmlReturn_t, nvmlDeviceGetComputeRunningProcesses_v2, (Device *, unsigned *, nvmlProcessInfo_t *),
      "nvmlDeviceGetComputeRunningProcesses_v3");

nvmlReturn_t nvmlDeviceGetTotalEccErrors(Device *device, int error, int counter, ull *count)
{
    (void)error, (void)counter;
    CHECK(device);
    *count = device->parent ? device->parent->ecc : device->ecc;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *temperature)
{
    (void)sensor;
    CHECK(device);
    *temperature = device->parent ? device->parent->temperature : device->temperature;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureV(Device *device, nvmlTemperature_t *temperature)
{
    CHECK(device);
    temperature->temperature = (int)(device->parent ? device->parent : device)->temperature;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts)
{
    CHECK(device);
    *milliwatts = 1000 * device->power;
    return device->has_power ? SUCCESS : NOT_SUPPORTED;
}

static ull milliseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (ull)now.tv_sec * 1000 + (ull)now.tv_nsec / 1000000;
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(Device *device, ull *millijoules)
{
    CHECK(device);
    *millijoules = device->power * milliseconds();
    return device->has_power ? SUCCESS : NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(Device *device, ull *reasons)
{
    CHECK(device);
    *reasons = device->throttle;
    return device->has_throttle ? SUCCESS : NOT_SUPPORTED;
}

/* Its older name, which goes with CUDA 14. */
nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, ull *reasons)
{
    return nvmlDeviceGetCurrentClocksEventReasons(device, reasons);
}

nvmlReturn_t nvmlDeviceGetPcieThroughput(Device *device, int counter, unsigned *kilobytes)
{
    (void)counter;
    CHECK(device);
    *kilobytes = device->pcie;
    return device->has_pcie ? SUCCESS : NOT_SUPPORTED;
}

/* NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX, of all links. */
nvmlReturn_t nvmlDeviceGetFieldValues(Device *device, int count, nvmlFieldValue_t *values)
{
    CHECK(device);
    for (int i = 0; i < count; i++) {
        bool known = device->has_nvlink && values[i].scopeId == ~0U && (values[i].fieldId == 138 || values[i].fieldId == 139);
        values[i].nvmlReturn = known ? SUCCESS : NOT_SUPPORTED;
        values[i].value.number = device->nvlink * milliseconds() / 1000 / 1024;
    }
    return SUCCESS;
}
