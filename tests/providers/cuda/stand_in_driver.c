/* Stands in for the NVIDIA driver's library: the functions that check() calls, with the signatures of cuda.h.
   The test compiles it once for each case, with what the driver is to say. */

#include <string.h>

#ifndef INIT
#define INIT 0
#endif
#ifndef DRIVER_CUDA
#define DRIVER_CUDA 12040
#endif
#ifndef DEVICES
#define DEVICES 2
#endif
#ifndef MAJOR
#define MAJOR 8
#endif

typedef int CUresult;
typedef int CUdevice;

CUresult cuInit(unsigned int flags) { return flags ? 1 : INIT; }

CUresult cuDriverGetVersion(int *version) {
    *version = DRIVER_CUDA;
    return 0;
}

CUresult cuDeviceGetCount(int *count) {
    *count = DEVICES;
    return 0;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = 40 + ordinal; /* a handle isn't its ordinal */
    return ordinal < DEVICES ? 0 : 101;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    strncpy(name, device == 40 ? "Stand-in GPU" : "Second GPU", (size_t)length);
    return 0;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    if (device < 40) return 101;
    *value = attribute == 75 ? MAJOR : attribute == 76 ? 6 : -1;
    return 0;
}
