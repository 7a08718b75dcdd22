// Sums and maxima over the threads of a block whose size is a multiple of 32 and at most 1024. Every thread gets the result.

#ifndef INFINITY  // NVRTC has no headers
#define INFINITY __int_as_float(0x7f800000)
#endif

__device__ float warp_sum(float value) {
    for (int offset = 16; offset > 0; offset >>= 1) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

__device__ float warp_max(float value) {
    for (int offset = 16; offset > 0; offset >>= 1) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}

// shared: one float for each of 32 warps.
__device__ float block_sum(float value, float *shared) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    value = warp_sum(value);
    if (lane == 0) shared[warp] = value;
    __syncthreads();
    value = warp_sum(lane < warps ? shared[lane] : 0.0f);
    __syncthreads();  // before anybody writes shared again
    return value;
}

__device__ float block_max(float value, float *shared) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    value = warp_max(value);
    if (lane == 0) shared[warp] = value;
    __syncthreads();
    value = warp_max(lane < warps ? shared[lane] : -INFINITY);
    __syncthreads();
    return value;
}
