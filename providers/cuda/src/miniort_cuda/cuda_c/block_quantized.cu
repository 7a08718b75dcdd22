// Rows times a matrix of few bits that is dequantized on the way, a warp for each element of the result.
//
// a: [rows, columns]; packed: [features, blocks, block * bits / 8] bytes, the lowest bits first; scales: [features, blocks];
// zero_points: [features, bytes of `blocks` numbers] packed the same way, or null for 2^(bits - 1) -> y: [rows, features].

extern "C" __global__ void block_quantized_product(
    const float *a, const unsigned char *packed, const float *scales, const unsigned char *zero_points, float *y, int features, int columns,
    int blocks, int block, int bits) {
    int lane = threadIdx.x & 31, feature = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
    const float *row = a + (long long)blockIdx.y * columns;
    int per_byte = 8 / bits, low = (1 << bits) - 1, bytes = block / per_byte, point_bytes = (blocks + per_byte - 1) / per_byte;
    float sum = 0.0f;
    if (feature < features) {
        const unsigned char *own = packed + (long long)feature * blocks * bytes;
        for (int byte = lane; byte < blocks * bytes; byte += 32) {
            int part = byte / bytes;
            int point = 1 << (bits - 1);
            if (zero_points) {
                int place = part % per_byte;
                point = (zero_points[(long long)feature * point_bytes + part / per_byte] >> (bits * place)) & low;
            }
            float scale = scales[(long long)feature * blocks + part];
            int numbers = own[byte];
            for (int i = 0; i < per_byte; i++) {
                int column = byte * per_byte + i;
                if (column < columns) sum += row[column] * (((numbers >> (bits * i)) & low) - point) * scale;
            }
        }
    }
    sum = warp_sum(sum);
    if (lane == 0 && feature < features) y[(long long)blockIdx.y * features + feature] = sum;
}
