/* A libcuda.so.1 that claims to be one GPU, of the compute capability in FAKE_CUDA_CC.
 *
 * Mosaic GPU asks the driver for the architecture to compile for, loads what it compiled and sets how much shared memory
 * a launch gets. With these answers it compiles on a machine without a GPU. What it loads is written to the file
 * FAKE_CUDA_IMAGE. Only the process that compiles may see this library: on its library path no real GPU can be used.
 */
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>

typedef int CUresult;
typedef void *Handle;

enum {
    SUCCESS = 0,
    NOT_SUPPORTED = 801,
    /* CUdevice_attribute */
    MAX_SHARED_MEMORY_PER_BLOCK = 8,
    MULTIPROCESSOR_COUNT = 16,
    COMPUTE_CAPABILITY_MAJOR = 75,
    COMPUTE_CAPABILITY_MINOR = 76,
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
    /* CUfunction_attribute */
    MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
};

static int object;

static int compute_capability(void) { return atoi(getenv("FAKE_CUDA_CC")); }

CUresult cuInit(unsigned flags) { return SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = 0; return SUCCESS; }
CUresult cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }
CUresult cuCtxGetCurrent(Handle *context) { *context = &object; return SUCCESS; }

CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case COMPUTE_CAPABILITY_MAJOR: *value = compute_capability() / 10; break;
    case COMPUTE_CAPABILITY_MINOR: *value = compute_capability() % 10; break;
    case MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    case MAX_SHARED_MEMORY_PER_BLOCK: *value = 49152; break;
    case MULTIPROCESSOR_COUNT: *value = 132; break;
    default: *value = 0;
    }
    return SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) { *text = "fake libcuda"; return SUCCESS; }
CUresult cuGetErrorName(CUresult error, const char **name) { *name = "FAKE"; return SUCCESS; }
CUresult cuModuleGetFunction(Handle *function, Handle module, const char *name) { *function = &object; return SUCCESS; }
CUresult cuModuleUnload(Handle module) { return SUCCESS; }
CUresult cuLaunchKernelEx(Handle config, Handle function, Handle *args, Handle *extra) { return NOT_SUPPORTED; }

/* A cubin ends with one of its two tables. */
CUresult cuModuleLoadData(Handle *module, const void *image) {
    const Elf64_Ehdr *elf = image;
    size_t sections_end = elf->e_shoff + (size_t)elf->e_shentsize * elf->e_shnum;
    size_t segments_end = elf->e_phoff + (size_t)elf->e_phentsize * elf->e_phnum;
    size_t size = sections_end > segments_end ? sections_end : segments_end;
    FILE *file = fopen(getenv("FAKE_CUDA_IMAGE"), "wb");
    if (!file || fwrite(image, 1, size, file) != size || fclose(file)) return NOT_SUPPORTED;
    *module = &object;
    return SUCCESS;
}

/* Nothing else says how much shared memory a launch gets. */
CUresult cuFuncSetAttribute(Handle function, int attribute, int value) {
    if (attribute == MAX_DYNAMIC_SHARED_SIZE_BYTES) fprintf(stderr, "dynamic_smem_bytes=%d\n", value);
    return SUCCESS;
}
