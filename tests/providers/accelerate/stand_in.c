/* Stands in for Apple's Accelerate framework where there is none: the functions that are bound, written from their documentation
   (cblas.h, vDSP.h, vForce.h), plainly and slowly. It aborts on what the real library refuses or would read wrongly. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

typedef long vDSP_Stride;
typedef unsigned long vDSP_Length;

enum { RowMajor = 101, ColMajor = 102, NoTrans = 111, Trans = 112 };

static void refuse(const char *function, const char *what) {
    fprintf(stderr, "%s: illegal %s\n", function, what);
    abort();
}

#define GEMM(NAME, REAL)                                                                                                       \
    void NAME(int order, int ta, int tb, int m, int n, int k, REAL alpha, const REAL *a, int lda, const REAL *b, int ldb,      \
              REAL beta, REAL *c, int ldc) {                                                                                   \
        if (order != RowMajor) refuse(#NAME, "order");                                                                         \
        if ((ta != NoTrans && ta != Trans) || (tb != NoTrans && tb != Trans)) refuse(#NAME, "transpose");                      \
        if (lda < (ta == NoTrans ? k : m) || lda < 1) refuse(#NAME, "lda");                                                    \
        if (ldb < (tb == NoTrans ? n : k) || ldb < 1) refuse(#NAME, "ldb");                                                    \
        if (ldc < n || ldc < 1) refuse(#NAME, "ldc");                                                                          \
        for (int i = 0; i < m; i++)                                                                                            \
            for (int j = 0; j < n; j++) {                                                                                      \
                double sum = 0;                                                                                                \
                for (int p = 0; p < k; p++)                                                                                    \
                    sum += (double)(ta == NoTrans ? a[(long)i * lda + p] : a[(long)p * lda + i]) *                             \
                           (tb == NoTrans ? b[(long)p * ldb + j] : b[(long)j * ldb + p]);                                      \
                REAL *out = c + (long)i * ldc + j;                                                                             \
                *out = (REAL)(alpha * sum + (beta == 0 ? 0 : beta * *out)); /* with beta 0, c is not read */                   \
            }                                                                                                                  \
    }

GEMM(cblas_sgemm, float)
GEMM(cblas_dgemm, double)

void vDSP_vadd(const float *a, vDSP_Stride ia, const float *b, vDSP_Stride ib, float *c, vDSP_Stride ic, vDSP_Length n) {
    for (vDSP_Length i = 0; i < n; i++) c[(long)i * ic] = a[(long)i * ia] + b[(long)i * ib];
}

void vDSP_vmul(const float *a, vDSP_Stride ia, const float *b, vDSP_Stride ib, float *c, vDSP_Stride ic, vDSP_Length n) {
    for (vDSP_Length i = 0; i < n; i++) c[(long)i * ic] = a[(long)i * ia] * b[(long)i * ib];
}

/* These two name B before A: C = A - B, and C = A / B. */
void vDSP_vsub(const float *b, vDSP_Stride ib, const float *a, vDSP_Stride ia, float *c, vDSP_Stride ic, vDSP_Length n) {
    for (vDSP_Length i = 0; i < n; i++) c[(long)i * ic] = a[(long)i * ia] - b[(long)i * ib];
}

void vDSP_vdiv(const float *b, vDSP_Stride ib, const float *a, vDSP_Stride ia, float *c, vDSP_Stride ic, vDSP_Length n) {
    for (vDSP_Length i = 0; i < n; i++) c[(long)i * ic] = a[(long)i * ia] / b[(long)i * ib];
}

#define VFORCE(NAME, REAL, EXPRESSION)                                                                                         \
    void NAME(REAL *y, const REAL *x, const int *n) {                                                                          \
        for (int i = 0; i < *n; i++) {                                                                                         \
            REAL v = x[i];                                                                                                     \
            y[i] = EXPRESSION;                                                                                                 \
        }                                                                                                                      \
    }

VFORCE(vvexpf, float, expf(v))
VFORCE(vvexp, double, exp(v))
VFORCE(vvlogf, float, logf(v))
VFORCE(vvlog, double, log(v))
VFORCE(vvsqrtf, float, sqrtf(v))
VFORCE(vvsqrt, double, sqrt(v))
VFORCE(vvtanhf, float, tanhf(v))
VFORCE(vvtanh, double, tanh(v))
VFORCE(vvrecf, float, 1 / v)
VFORCE(vvrec, double, 1 / v)
