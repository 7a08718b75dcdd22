// Pairs of elements turned by angles, a thread for each pair and each element behind them.
//
// x, y: [batch, time, heads, size], laid out as x_batch, x_time and x_head elements say; cosines, sines: [batch, time, half], half <= size / 2.

extern "C" __global__ void rotary_embedding(
    const float *x, const float *cosines, const float *sines, float *y, int batch, int time, int heads, int size, int half,
    long long x_batch, long long x_time, long long x_head, int interleaved) {
    long long rest = size - 2 * half, work = half + rest;
    long long number = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= (long long)batch * time * heads * work) return;
    int item = number % work;
    long long place = number / work;
    int head = place % heads, step = place / heads % time, row = place / heads / time;
    long long start = row * x_batch + step * x_time + head * x_head;
    if (item >= half) {  // behind the elements that are turned
        long long behind = start + 2 * half + (item - half);
        y[behind] = x[behind];
        return;
    }
    long long first = start + (interleaved ? 2 * item : item), second = start + (interleaved ? 2 * item + 1 : item + half);
    float cosine = cosines[((long long)row * time + step) * half + item], sine = sines[((long long)row * time + step) * half + item];
    float a = x[first], b = x[second];
    y[first] = a * cosine - b * sine;
    y[second] = a * sine + b * cosine;
}
