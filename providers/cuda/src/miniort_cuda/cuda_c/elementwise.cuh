// What the kernels that are generated from chains of elementwise ops begin with. Functions are named for the ops that need them.

#ifdef __CUDACC_RTC__  // NVRTC has no headers; who compiles this for the host brings his own
__device__ unsigned short to_half(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#endif

__device__ float from_bfloat16(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

__device__ unsigned short to_bfloat16(float x) {
    unsigned bits = __float_as_uint(x);
    return x != x ? 0x7fc0 : (unsigned short)((bits + (((bits >> 16) & 1) + 0x7fff)) >> 16);  // ties to the even one
}

// The one that isn't a number, if there is one, as Max and Min want it.
template <typename T> __device__ T larger(T a, T b) { return a > b || a != a ? a : b; }
template <typename T> __device__ T smaller(T a, T b) { return a < b || a != a ? a : b; }

template <typename T> __device__ T sign_of(T x) { return x != x ? x : (T)((x > (T)0) - (x < (T)0)); }

__device__ float sigmoid_of(float x) {
    float e = expf(-fabsf(x));  // no power grows
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

__device__ float gelu_exact_of(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }

__device__ float gelu_by_tanh_of(float x) { return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x))); }
