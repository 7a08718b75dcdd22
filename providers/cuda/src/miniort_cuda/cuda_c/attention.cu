// Attention of one query per head over a cache, the keys split over blocks (Flash-Decoding; Dao et al. 2023), in two steps.
//
// q: [batch, heads, dim] floats; k, v: floats, or float16 where is_half. k: rows of dim elements, key_batch, key_head, key_time elements apart, so a slice of a larger buffer will do, v
// likewise with value_dim; mask: bytes, 0 where a key may not be seen, mask_batch and mask_head elements apart (0: shared), may be null;
// bias: the same as floats that are added. dim, value_dim: at most 256.
// partial: [batch, heads, splits, value_dim + 2]: the weighted sum of a split's values, its largest score, and its sum of exponentials.

#define LANES 32
#define MOST_WARPS 8
#define MOST_DIM 256
#define PER_LANE (MOST_DIM / LANES)

extern "C" __global__ void attention_splits(
    const float *q, const void *k, const void *v, const unsigned char *mask, const float *bias, float *partial, int heads, int kv_heads,
    int length, int dim, int value_dim, long long key_batch, long long key_head, long long key_time, long long value_batch,
    long long value_head, long long value_time, long long mask_batch, long long mask_head, float scale, int is_half) {
    __shared__ float sums[MOST_WARPS][MOST_DIM];
    __shared__ float peaks[MOST_WARPS];
    __shared__ float totals[MOST_WARPS];
    __shared__ float shared[LANES];
    int split = blockIdx.x, head = blockIdx.y, batch = blockIdx.z, splits = gridDim.x;
    int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES, warps = blockDim.x / LANES;
    int share = (length + splits - 1) / splits, first = split * share, last = min(first + share, length);
    int kv_head = head / (heads / kv_heads);
    const float *query = q + ((long long)batch * heads + head) * dim;
    long long keys = batch * key_batch + kv_head * key_head, values = batch * value_batch + kv_head * value_head;
    long long masked = batch * mask_batch + head * mask_head;

    if (mask) {  // most of a split may be hidden, as in a cache that has room for more: look only at what lies between the visible keys
        float earliest = INFINITY, latest = -INFINITY;
        for (int time = first + threadIdx.x; time < last; time += blockDim.x)
            if (mask[masked + time]) {
                earliest = fminf(earliest, time);
                latest = time;
            }
        latest = block_max(latest, shared);
        earliest = -block_max(-earliest, shared);
        last = latest < first ? first : (int)latest + 1;
        first = latest < first ? first : (int)earliest;
    }
    float sum[PER_LANE];
    for (int i = 0; i < PER_LANE; i++) sum[i] = 0.0f;
    float peak = -INFINITY, total = 0.0f;
    int rounds = last > first ? (last - first + warps - 1) / warps : 0;
    for (int round = 0; round < rounds; round++) {  // as many for every warp, so that all its threads meet in the shuffles
        int time = first + round * warps + warp;
        int inside = time < last;
        float dot = 0.0f;
        if (inside)
            for (int i = lane; i < dim; i += LANES) dot += query[i] * number_at(k, keys + time * key_time + i, is_half);
        float score = warp_sum(dot) * scale;
        if (!inside || (mask && !mask[masked + time])) score = -INFINITY;
        else if (bias) score += bias[masked + time];
        if (score == -INFINITY) continue;  // the same for all threads of a warp
        float larger = fmaxf(peak, score), shrink = expf(peak - larger), weight = expf(score - larger);
        total = total * shrink + weight;
        for (int i = 0; i < PER_LANE; i++) {
            int place = i * LANES + lane;
            if (place < value_dim) sum[i] = sum[i] * shrink + weight * number_at(v, values + time * value_time + place, is_half);
        }
        peak = larger;
    }
    for (int i = 0; i < PER_LANE; i++)
        if (i * LANES + lane < value_dim) sums[warp][i * LANES + lane] = sum[i];
    if (lane == 0) {
        peaks[warp] = peak;
        totals[warp] = total;
    }
    __syncthreads();
    float largest = -INFINITY;
    for (int w = 0; w < warps; w++) largest = fmaxf(largest, peaks[w]);
    float *out = partial + (((long long)batch * heads + head) * splits + split) * (value_dim + 2);
    for (int place = threadIdx.x; place < value_dim; place += blockDim.x) {
        float y = 0.0f;
        for (int w = 0; w < warps; w++)
            if (peaks[w] > -INFINITY) y += sums[w][place] * expf(peaks[w] - largest);
        out[place] = y;
    }
    if (threadIdx.x == 0) {
        float y = 0.0f;
        for (int w = 0; w < warps; w++)
            if (peaks[w] > -INFINITY) y += totals[w] * expf(peaks[w] - largest);
        out[value_dim] = largest;
        out[value_dim + 1] = y;
    }
}

// y: [batch, heads, value_dim], zeros where a query sees no key. A block for each head of each row.
extern "C" __global__ void attention_joined(const float *partial, float *y, int splits, int value_dim) {
    const float *parts = partial + (long long)blockIdx.x * splits * (value_dim + 2);
    float largest = -INFINITY, total = 0.0f;
    for (int s = 0; s < splits; s++) largest = fmaxf(largest, parts[s * (value_dim + 2) + value_dim]);
    for (int s = 0; s < splits; s++) {
        float peak = parts[s * (value_dim + 2) + value_dim];
        if (peak > -INFINITY) total += parts[s * (value_dim + 2) + value_dim + 1] * expf(peak - largest);
    }
    for (int place = threadIdx.x; place < value_dim; place += blockDim.x) {
        float sum = 0.0f;
        for (int s = 0; s < splits; s++) {
            float peak = parts[s * (value_dim + 2) + value_dim];
            if (peak > -INFINITY) sum += parts[s * (value_dim + 2) + place] * expf(peak - largest);
        }
        y[(long long)blockIdx.x * value_dim + place] = total > 0.0f ? sum / total : 0.0f;
    }
}
