/* Stands in for the driver's library where there is no GPU: whatever it is asked, the answer is that there is no device.
 *
 * Some libraries of the set for GPUs are linked with libcuda.so.1 and cannot be imported without it. These are the
 * functions that they name; which, tells `nm -D --undefined-only` of each. `make test-gpu-set` compiles this file.
 */

enum { CUDA_ERROR_NO_DEVICE = 100 };

#define NO_DEVICE(function) \
    int function(void) { return CUDA_ERROR_NO_DEVICE; }

#define TEXT(function) \
    int function(int error, const char **text) { \
        (void)error; \
        *text = "no device: a stand-in for the driver"; \
        return 0; \
    }

TEXT(cuGetErrorName)
TEXT(cuGetErrorString)

NO_DEVICE(cuCtxFromGreenCtx) NO_DEVICE(cuCtxGetCurrent) NO_DEVICE(cuCtxGetDevice) NO_DEVICE(cuCtxGetId)
NO_DEVICE(cuCtxPopCurrent_v2) NO_DEVICE(cuCtxPushCurrent_v2) NO_DEVICE(cuCtxSetCurrent)
NO_DEVICE(cuDevResourceGenerateDesc) NO_DEVICE(cuDevSmResourceSplitByCount) NO_DEVICE(cuDeviceGet)
NO_DEVICE(cuDeviceGetAttribute) NO_DEVICE(cuDeviceGetDevResource) NO_DEVICE(cuDevicePrimaryCtxGetState)
NO_DEVICE(cuDevicePrimaryCtxRetain) NO_DEVICE(cuDriverGetVersion) NO_DEVICE(cuFuncGetAttribute)
NO_DEVICE(cuFuncSetAttribute) NO_DEVICE(cuFuncSetCacheConfig) NO_DEVICE(cuGetExportTable)
NO_DEVICE(cuGetProcAddress_v2) NO_DEVICE(cuGreenCtxCreate) NO_DEVICE(cuGreenCtxDestroy)
NO_DEVICE(cuGreenCtxGetDevResource) NO_DEVICE(cuInit) NO_DEVICE(cuLaunchCooperativeKernel) NO_DEVICE(cuLaunchKernel)
NO_DEVICE(cuLaunchKernelEx) NO_DEVICE(cuLinkAddData_v2) NO_DEVICE(cuLinkComplete) NO_DEVICE(cuLinkCreate_v2)
NO_DEVICE(cuMemAddressFree) NO_DEVICE(cuMemAddressReserve) NO_DEVICE(cuMemCreate)
NO_DEVICE(cuMemGetAllocationGranularity) NO_DEVICE(cuMemMap) NO_DEVICE(cuMemRelease) NO_DEVICE(cuMemSetAccess)
NO_DEVICE(cuMemUnmap) NO_DEVICE(cuModuleGetFunction) NO_DEVICE(cuModuleLoad) NO_DEVICE(cuModuleLoadData)
NO_DEVICE(cuModuleLoadDataEx) NO_DEVICE(cuModuleUnload) NO_DEVICE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NO_DEVICE(cuPointerGetAttribute) NO_DEVICE(cuStreamCreate) NO_DEVICE(cuTensorMapEncodeTiled)
