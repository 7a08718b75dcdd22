// Softmax of rows, a block for each. x, y: [rows, size].

extern "C" __global__ void softmax(const float *x, float *y, long long size) {
    __shared__ float shared[32];
    const float *row = x + blockIdx.x * size;
    float peak = -INFINITY;
    for (long long i = threadIdx.x; i < size; i += blockDim.x) peak = fmaxf(peak, row[i]);
    peak = block_max(peak, shared);
    float sum = 0.0f;
    for (long long i = threadIdx.x; i < size; i += blockDim.x) sum += expf(row[i] - peak);
    float total = block_sum(sum, shared);
    for (long long i = threadIdx.x; i < size; i += blockDim.x) y[blockIdx.x * size + i] = expf(row[i] - peak) / total;
}
