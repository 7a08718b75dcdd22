// Arrays of floats, or of float16 as 16-bit integers, read as floats: NVRTC has no headers, and so no type for float16.

__device__ float half_to_float(unsigned short bits) {
    union { unsigned number; float value; } wide, scale;
    wide.number = (bits & 0x7fffu) << 13;  // exponent and mantissa in their places, the exponent too small by 112
    scale.number = (127u + 112u) << 23;
    wide.value *= scale.value;  // exact, and it makes small numbers normal
    if ((bits & 0x7c00u) == 0x7c00u) wide.number |= 0x7f800000u;  // infinities and NaN
    wide.number |= (bits & 0x8000u) << 16;
    return wide.value;
}

// Element `place` of x: float16 where is_half, else float.
__device__ float number_at(const void *x, long long place, int is_half) {
    return is_half ? half_to_float(((const unsigned short *)x)[place]) : ((const float *)x)[place];
}
