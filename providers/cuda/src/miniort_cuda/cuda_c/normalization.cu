// Normalization of rows, a block for each. x, y: [rows, size]; scale, bias: [size], bias may be null.

extern "C" __global__ void layer_normalization(const float *x, const float *scale, const float *bias, float *y, long long size, float epsilon) {
    __shared__ float shared[32];
    const float *row = x + blockIdx.x * size;
    float sum = 0.0f;
    for (long long i = threadIdx.x; i < size; i += blockDim.x) sum += row[i];
    float mean = block_sum(sum, shared) / size;
    float squares = 0.0f;
    for (long long i = threadIdx.x; i < size; i += blockDim.x) squares += (row[i] - mean) * (row[i] - mean);
    float inverse = 1.0f / sqrtf(block_sum(squares, shared) / size + epsilon);
    for (long long i = threadIdx.x; i < size; i += blockDim.x)
        y[blockIdx.x * size + i] = (row[i] - mean) * inverse * scale[i] + (bias ? bias[i] : 0.0f);
}

extern "C" __global__ void rms_normalization(const float *x, const float *scale, float *y, long long size, float epsilon) {
    __shared__ float shared[32];
    const float *row = x + blockIdx.x * size;
    float squares = 0.0f;
    for (long long i = threadIdx.x; i < size; i += blockDim.x) squares += row[i] * row[i];
    float inverse = 1.0f / sqrtf(block_sum(squares, shared) / size + epsilon);
    for (long long i = threadIdx.x; i < size; i += blockDim.x) y[blockIdx.x * size + i] = row[i] * inverse * scale[i];
}
