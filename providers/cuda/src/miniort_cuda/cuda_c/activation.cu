// Activation functions in one pass, a thread for each element. x, y: [count]; alpha is Swish's own.

__device__ float sigmoid_of(float x) {
    float e = expf(-fabsf(x));  // no power grows
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

extern "C" __global__ void sigmoid(const float *x, float *y, long long count, float alpha) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] = sigmoid_of(x[i]);
}

extern "C" __global__ void swish(const float *x, float *y, long long count, float alpha) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] = x[i] * sigmoid_of(alpha * x[i]);
}

extern "C" __global__ void gelu_exact(const float *x, float *y, long long count, float alpha) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678118654752f));
}

extern "C" __global__ void gelu_by_tanh(const float *x, float *y, long long count, float alpha) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] = 0.5f * x[i] * (1.0f + tanhf(0.79788456080286536f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
}
