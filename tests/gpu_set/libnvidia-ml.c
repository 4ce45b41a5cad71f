/* Stands in for the library of nvidia-smi: a driver of version STAND_IN_DRIVER, or without it one that does not answer. */

#include <stdio.h>
#include <stdlib.h>

enum { NVML_SUCCESS = 0, NVML_ERROR_DRIVER_NOT_LOADED = 9 };

int nvmlInit_v2(void) { return getenv("STAND_IN_DRIVER") ? NVML_SUCCESS : NVML_ERROR_DRIVER_NOT_LOADED; }

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    snprintf(version, length, "%s", getenv("STAND_IN_DRIVER"));
    return NVML_SUCCESS;
}
