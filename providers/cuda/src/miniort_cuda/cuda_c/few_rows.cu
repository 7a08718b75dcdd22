// A few rows times a matrix of floats, for runs that are recorded: CuPy doesn't call cuBLAS while a stream is captured.
//
// a: [rows, inner] floats; b: [inner, columns] floats, or float16 where is_half -> y: [rows, columns]. gridDim.z is the number of rows.

#define LANES 32
#define MOST_WARPS 8

// b's rows are contiguous, row_step elements apart. A lane for each column; a block's warps, and the splits, share b's rows.
// partial: [splits, rows, columns], the sums over each split's rows of b.
extern "C" __global__ void rows_by_columns(
    const float *a, const void *b, float *partial, int inner, int columns, int rows, long long row_step, int is_half) {
    __shared__ float sums[MOST_WARPS][LANES];
    int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, warps = blockDim.x / LANES;
    int column = blockIdx.x * LANES + lane, split = blockIdx.y, splits = gridDim.y, row = blockIdx.z;
    int share = (inner + splits - 1) / splits, first = split * share, last = min(first + share, inner);
    const float *own = a + (long long)row * inner;
    float sum = 0.0f;
    if (column < columns)
        for (int k = first + warp; k < last; k += warps) sum += own[k] * number_at(b, k * row_step + column, is_half);
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < columns) {
        float total = 0.0f;
        for (int w = 0; w < warps; w++) total += sums[w][lane];
        partial[((long long)split * rows + row) * columns + column] = total;
    }
}

// y[i]: the sum of the splits' parts, which are count elements apart.
extern "C" __global__ void splits_joined(const float *partial, float *y, int count, int splits) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    float total = 0.0f;
    for (int s = 0; s < splits; s++) total += partial[(long long)s * count + i];
    y[i] = total;
}

// b's columns are contiguous, column_step elements apart, as in a matrix that was transposed. A warp for each column.
extern "C" __global__ void rows_by_contiguous_columns(
    const float *a, const void *b, float *y, int inner, int columns, long long column_step, int is_half) {
    int lane = threadIdx.x % LANES, column = blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES, row = blockIdx.z;
    const float *own = a + (long long)row * inner;
    float sum = 0.0f;
    if (column < columns)
        for (int k = lane; k < inner; k += LANES) sum += own[k] * number_at(b, column * column_step + k, is_half);
    sum = warp_sum(sum);
    if (lane == 0 && column < columns) y[(long long)row * columns + column] = sum;
}
