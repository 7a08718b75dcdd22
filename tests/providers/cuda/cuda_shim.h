// Enough of CUDA C to run our kernels on the host: threads of a block are fibers that take turns, one block after the other.
//
// A fiber runs until it comes to a barrier or a shuffle, then the next one runs. So every thread of a block has to come to the same ones,
// which CUDA asks for as well (for shuffles: of a warp), and what a kernel gives doesn't depend on luck.

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

struct Three { unsigned x, y, z; };

static Three threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

constexpr size_t STACK = 1 << 16;

static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<char> alive;
static std::vector<float> exchanged;
static unsigned current;
static const std::function<void()> *body;

static void enter() {
    (*body)();
    alive[current] = 0;
    swapcontext(&fibers[current], &scheduler);
}

static void yield() {
    unsigned own = current;
    swapcontext(&fibers[own], &scheduler);
}

static void run_block(unsigned threads) {
    static std::vector<char> stacks;
    stacks.resize(threads * STACK);
    fibers.assign(threads, ucontext_t());
    alive.assign(threads, 1);
    exchanged.assign(threads, 0.0f);
    for (unsigned t = 0; t < threads; t++) {
        getcontext(&fibers[t]);
        fibers[t].uc_stack.ss_sp = &stacks[t * STACK];
        fibers[t].uc_stack.ss_size = STACK;
        fibers[t].uc_link = nullptr;
        makecontext(&fibers[t], enter, 0);
    }
    for (bool any = true; any;) {
        any = false;
        unsigned finished = 0, waiting = 0;
        for (unsigned t = 0; t < threads; t++) {
            if (!alive[t]) continue;
            current = t;
            threadIdx = {t, 0, 0};
            swapcontext(&scheduler, &fibers[t]);
            any = any || alive[t];
            (alive[t] ? waiting : finished)++;
        }
        if (finished && waiting) abort();  // some threads came to a barrier that others never reach
    }
}

static void launch(Three grid, unsigned threads, const std::function<void()> &kernel) {
    gridDim = grid;
    blockDim = {threads, 1, 1};
    body = &kernel;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                blockIdx = {x, y, z};
                run_block(threads);
            }
}

}  // namespace shim

#define __global__
#define __device__ static inline
#define __shared__ static

static inline void __syncthreads() { shim::yield(); }

static inline float __shfl_xor_sync(unsigned, float value, int mask) {
    unsigned own = shim::current;
    shim::exchanged[own] = value;
    shim::yield();
    unsigned other = own ^ (unsigned)mask;
    float result = other < shim::exchanged.size() ? shim::exchanged[other] : value;
    shim::yield();
    return result;
}

static inline float __uint_as_float(unsigned bits) { float x; std::memcpy(&x, &bits, sizeof x); return x; }
static inline unsigned __float_as_uint(float x) { unsigned bits; std::memcpy(&bits, &x, sizeof bits); return bits; }

// What a GPU has an instruction for: float32 to float16, to the nearest, ties to the even one.
static inline unsigned short to_half(float x) {
    unsigned short sign = std::signbit(x) ? 0x8000 : 0;
    float size = std::fabs(x);
    if (size == 0.0f) return sign;
    if (x != x) return 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;
    int exponent;
    std::frexp(size, &exponent);
    int scale = exponent < -13 ? -24 : exponent - 11;  // the last bit's
    unsigned fraction = (unsigned)std::nearbyint(std::ldexp(size, -scale));
    return sign | (unsigned short)(fraction + ((unsigned)(scale + 24) << 10));  // a fraction of 2048 carries into the exponent
}

using std::fmaxf;
using std::fminf;
using std::min;
