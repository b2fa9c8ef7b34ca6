// A CUDA driver that does nothing but tell `on_launch` about launches. A tensor map holds what it
// was made of.
#include <stdint.h>
#include <string.h>

typedef struct {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void *stream, *attributes;
  unsigned attribute_count;
} LaunchConfig;

void (*on_launch)(const LaunchConfig *, void *, void **);

int cuLaunchKernelEx(const LaunchConfig *config, void *function, void **parameters, void **extra) {
  if (on_launch) on_launch(config, function, parameters);
  return 0;
}

int cuTensorMapEncodeTiled(uint64_t *map, int dtype, uint32_t rank, uint64_t address,
                           const uint64_t *sizes, const uint64_t *strides, const uint32_t *box,
                           const uint32_t *steps, int interleave, int swizzle, int l2, int fill) {
  memset(map, 0, 128);
  map[0] = address;
  map[1] = dtype | rank << 8 | swizzle << 16 | fill << 24;
  for (uint32_t i = 0; i < rank; ++i) {
    map[2 + i] = sizes[i];
    if (i + 1 < rank) map[7 + i] = strides[i];
    map[11 + i] = box[i];
  }
  return 0;
}

static uintptr_t modules;
int cuModuleLoadData(uintptr_t *module, const void *image) { *module = ++modules; return 0; }
int cuModuleGetFunction(uintptr_t *function, uintptr_t module, const char *name) {
  *function = module;
  return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : 0;  // threads of a block
  return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 232448; return 0; }
int cuPointerGetAttribute(uint64_t *data, int attribute, uint64_t address) {
  *data = address;
  return 0;
}
int cuCtxGetCurrent(void **context) { *context = &modules; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &modules; return 0; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "error"; return 0; }

#define NOTHING(name) int name(void) { return 0; }
NOTHING(cuCtxSetCurrent)
NOTHING(cuCtxGetLimit)
NOTHING(cuCtxSetLimit)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuModuleUnload)
NOTHING(cuOccupancyMaxActiveClusters)
NOTHING(cuStreamIsCapturing)
