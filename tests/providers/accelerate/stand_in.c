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

#define GEMM(NAME, REAL, INDEX)                                                                                                       \
    void NAME(int order, int ta, int tb, INDEX m, INDEX n, INDEX k, REAL alpha, const REAL *a, INDEX lda, const REAL *b, INDEX ldb,      \
              REAL beta, REAL *c, INDEX ldc) {                                                                                   \
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

GEMM(cblas_sgemm, float, int)
GEMM(cblas_dgemm, double, int)
GEMM(cblas_sgemm$NEWLAPACK$ILP64, float, long)
GEMM(cblas_dgemm$NEWLAPACK$ILP64, double, long)

#define GEMV(NAME, REAL, INDEX)                                                                                                \
    void NAME(int order, int ta, INDEX m, INDEX n, REAL alpha, const REAL *a, INDEX lda, const REAL *x, INDEX incx, REAL beta, \
              REAL *y, INDEX incy) {                                                                                           \
        if (order != RowMajor) refuse(#NAME, "order");                                                                         \
        if (ta != NoTrans && ta != Trans) refuse(#NAME, "transpose");                                                          \
        if (lda < n || lda < 1) refuse(#NAME, "lda");                                                                          \
        if (incx != 1 || incy != 1) refuse(#NAME, "step, for this stand-in");                                                  \
        INDEX rows = ta == NoTrans ? m : n, depth = ta == NoTrans ? n : m;                                                     \
        for (INDEX i = 0; i < rows; i++) {                                                                                     \
            double sum = 0;                                                                                                    \
            for (INDEX p = 0; p < depth; p++) sum += (double)(ta == NoTrans ? a[i * lda + p] : a[p * lda + i]) * x[p];         \
            y[i] = (REAL)(alpha * sum + (beta == 0 ? 0 : beta * y[i]));                                                        \
        }                                                                                                                      \
    }

GEMV(cblas_sgemv, float, int)
GEMV(cblas_dgemv, double, int)
GEMV(cblas_sgemv$NEWLAPACK$ILP64, float, long)
GEMV(cblas_dgemv$NEWLAPACK$ILP64, double, long)

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

void vDSP_vma(const float *a, vDSP_Stride ia, const float *b, vDSP_Stride ib, const float *c, vDSP_Stride ic, float *d, vDSP_Stride id,
              vDSP_Length n) {
    for (vDSP_Length i = 0; i < n; i++) d[(long)i * id] = a[(long)i * ia] * b[(long)i * ib] + c[(long)i * ic];
}

void vDSP_vsadd(const float *a, vDSP_Stride ia, const float *b, float *c, vDSP_Stride ic, vDSP_Length n) {
    for (vDSP_Length i = 0; i < n; i++) c[(long)i * ic] = a[(long)i * ia] + *b;
}

void vDSP_vsmul(const float *a, vDSP_Stride ia, const float *b, float *c, vDSP_Stride ic, vDSP_Length n) {
    for (vDSP_Length i = 0; i < n; i++) c[(long)i * ic] = a[(long)i * ia] * *b;
}

void vDSP_sve(const float *a, vDSP_Stride ia, float *c, vDSP_Length n) {
    double sum = 0;
    for (vDSP_Length i = 0; i < n; i++) sum += a[(long)i * ia];
    *c = (float)sum;
}

void vDSP_svesq(const float *a, vDSP_Stride ia, float *c, vDSP_Length n) {
    double sum = 0;
    for (vDSP_Length i = 0; i < n; i++) sum += (double)a[(long)i * ia] * a[(long)i * ia];
    *c = (float)sum;
}

void vDSP_meanv(const float *a, vDSP_Stride ia, float *c, vDSP_Length n) {
    vDSP_sve(a, ia, c, n);
    *c /= (float)n;
}

void vDSP_maxv(const float *a, vDSP_Stride ia, float *c, vDSP_Length n) {
    *c = -INFINITY; /* of an empty vector */
    for (vDSP_Length i = 0; i < n; i++)
        if (a[(long)i * ia] > *c) *c = a[(long)i * ia];
}

/* C has M rows and N columns, so A has N rows and M columns. */
void vDSP_mtrans(const float *a, vDSP_Stride ia, float *c, vDSP_Stride ic, vDSP_Length m, vDSP_Length n) {
    for (vDSP_Length row = 0; row < m; row++)
        for (vDSP_Length column = 0; column < n; column++) c[(long)(row * n + column) * ic] = a[(long)(column * m + row) * ia];
}

#define CONVERT(NAME, FROM, TO)                                                                                                \
    void NAME(const FROM *a, vDSP_Stride ia, TO *c, vDSP_Stride ic, vDSP_Length n) {                                           \
        for (vDSP_Length i = 0; i < n; i++) c[(long)i * ic] = (TO)a[(long)i * ia];                                             \
    }

CONVERT(vDSP_vspdp, float, double)
CONVERT(vDSP_vdpsp, double, float)
CONVERT(vDSP_vflt32, int, float)
CONVERT(vDSP_vfltu8, unsigned char, float)

/* z = x to the power of y, the exponents first. */
void vvpowf(float *z, const float *y, const float *x, const int *n) {
    for (int i = 0; i < *n; i++) z[i] = powf(x[i], y[i]);
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
VFORCE(vverff, float, erff(v))
