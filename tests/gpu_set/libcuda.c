/* Stands in for the driver's library where there is no GPU: whatever it is asked, the answer is that there is no device.
 *
 * Some libraries of the set for GPUs are linked with libcuda.so.1 and cannot be imported without it. These are the
 * functions that they name; which, tells `nm -D --undefined-only` of each. `make test-gpu-set` compiles this file.
 *
 * With STAND_IN_DEVICES=N it names N devices that can compute nothing, of a driver for CUDA STAND_IN_CUDA (13000: 13.0).
 * STAND_IN_COMPUTE_MODE is their compute mode (0: default, 3: exclusive process).
 * With STAND_IN_LOG=FOLDER every process writes a file there when CUDA begins in it, which is its first cuInit: a line with its
 * command, and the environment as CUDA reads it then. The loader's, which it read at the start of the process, is in a second
 * file, whose name ends in .start.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CUDA_SUCCESS = 0, CUDA_ERROR_NO_DEVICE = 100, CAPABILITY_MAJOR = 75, COMPUTE_MODE = 20 };

static int setting(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static int devices(void) { return setting("STAND_IN_DEVICES", 0); }

static void copy(const char *from, FILE *file, int separator) {
    FILE *source = fopen(from, "r");
    for (int letter; source && (letter = getc(source)) != EOF;) putc(letter ? letter : separator, file);
    if (source) fclose(source);
}

static void record(const char *folder) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%d", folder, getpid());
    FILE *file = fopen(path, "wx");
    if (!file) return;
    copy("/proc/self/cmdline", file, ' ');
    putc('\n', file);
    for (char **entry = environ; *entry; entry++) fwrite(*entry, 1, strlen(*entry) + 1, file);
    fclose(file);
    snprintf(path, sizeof path, "%s/%d.start", folder, getpid());
    if (!(file = fopen(path, "w"))) return;
    copy("/proc/self/environ", file, 0);
    fclose(file);
}

#define NO_DEVICE(function) \
    int function(void) { return CUDA_ERROR_NO_DEVICE; }

#define TEXT(function) \
    int function(int error, const char **text) { \
        (void)error; \
        *text = "no device: a stand-in for the driver"; \
        return CUDA_SUCCESS; \
    }

TEXT(cuGetErrorName)
TEXT(cuGetErrorString)

int cuInit(unsigned flags) {
    (void)flags;
    if (getenv("STAND_IN_LOG")) record(getenv("STAND_IN_LOG"));
    return devices() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

int cuDriverGetVersion(int *version) {
    *version = setting("STAND_IN_CUDA", 13000);
    return CUDA_SUCCESS;
}

int cuDeviceGetCount(int *count) {
    *count = devices();
    return CUDA_SUCCESS;
}

int cuDeviceGet(int *device, int index) {
    *device = index;
    return index < devices() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

int cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    snprintf(name, length, "Stand-in H100");
    return CUDA_SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == CAPABILITY_MAJOR ? 9 : attribute == COMPUTE_MODE ? setting("STAND_IN_COMPUTE_MODE", 0) : 0;
    return device < devices() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

static NO_DEVICE(none)

int cuGetProcAddress_v2(const char *symbol, void **function, int version, unsigned long flags, int *status) {
    char second[128];
    (void)version, (void)flags;
    if (status) *status = 0;
    snprintf(second, sizeof second, "%s_v2", symbol);
    *function = dlsym(RTLD_DEFAULT, second);
    if (!*function) *function = dlsym(RTLD_DEFAULT, symbol);
    if (!*function) *function = (void *)none;
    return devices() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

NO_DEVICE(cuCtxFromGreenCtx) NO_DEVICE(cuCtxGetCurrent) NO_DEVICE(cuCtxGetDevice) NO_DEVICE(cuCtxGetId)
NO_DEVICE(cuCtxPopCurrent_v2) NO_DEVICE(cuCtxPushCurrent_v2) NO_DEVICE(cuCtxSetCurrent)
NO_DEVICE(cuDevResourceGenerateDesc) NO_DEVICE(cuDevSmResourceSplitByCount)
NO_DEVICE(cuDeviceGetDevResource) NO_DEVICE(cuDevicePrimaryCtxGetState)
NO_DEVICE(cuDevicePrimaryCtxRetain) NO_DEVICE(cuFuncGetAttribute)
NO_DEVICE(cuFuncSetAttribute) NO_DEVICE(cuFuncSetCacheConfig) NO_DEVICE(cuGetExportTable)
NO_DEVICE(cuGreenCtxCreate) NO_DEVICE(cuGreenCtxDestroy)
NO_DEVICE(cuGreenCtxGetDevResource) NO_DEVICE(cuLaunchCooperativeKernel) NO_DEVICE(cuLaunchKernel)
NO_DEVICE(cuLaunchKernelEx) NO_DEVICE(cuLinkAddData_v2) NO_DEVICE(cuLinkComplete) NO_DEVICE(cuLinkCreate_v2)
NO_DEVICE(cuMemAddressFree) NO_DEVICE(cuMemAddressReserve) NO_DEVICE(cuMemCreate)
NO_DEVICE(cuMemGetAllocationGranularity) NO_DEVICE(cuMemMap) NO_DEVICE(cuMemRelease) NO_DEVICE(cuMemSetAccess)
NO_DEVICE(cuMemUnmap) NO_DEVICE(cuModuleGetFunction) NO_DEVICE(cuModuleLoad) NO_DEVICE(cuModuleLoadData)
NO_DEVICE(cuModuleLoadDataEx) NO_DEVICE(cuModuleUnload) NO_DEVICE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NO_DEVICE(cuPointerGetAttribute) NO_DEVICE(cuStreamCreate) NO_DEVICE(cuTensorMapEncodeTiled)
