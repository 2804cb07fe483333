// What dnn.c uses of the runtime compiler; see cuda_runtime_api.h.
#ifndef STANDIN_NVRTC_H
#define STANDIN_NVRTC_H

#include <stddef.h>

typedef enum { NVRTC_SUCCESS = 0 } nvrtcResult;
typedef struct nvrtcCode *nvrtcProgram;

#endif
