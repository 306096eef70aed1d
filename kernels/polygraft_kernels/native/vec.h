// A thin layer over GCC vector extensions: floats in groups of L = 4, 8 or 16 lanes, and bfloat16 in memory. Everything
// lies in a namespace named after the instruction set, so that no two units ever share an inline function. A unit says
// what it may use with PG_FMA, PG_AVX512 and PG_AVX512BF16: gcc's own macros do not follow its target pragma.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PG_INLINE inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi"  // wide vectors by value: every function that takes one is inlined

namespace pg {

struct bf16 {
    uint16_t bits;
};

namespace PG_ISA {

// f(0), ..., f(N - 1), written out before gcc decides what may live in registers; a loop is unrolled too late for that.
#define PG_ALWAYS __attribute__((always_inline))
template <int I>
struct Index {
    constexpr operator int() const { return I; }
};
template <int N, class F>
PG_INLINE void unroll(F f) {
    if constexpr (N > 0) {
        unroll<N - 1>(f);
        f(Index<N - 1>());
    }
}

template <int L>
struct Lanes;

#define PG_LANES(L)                                                \
    template <>                                                    \
    struct Lanes<L> {                                              \
        typedef float F __attribute__((vector_size(L * 4)));       \
        typedef int32_t I __attribute__((vector_size(L * 4)));     \
        typedef uint32_t U __attribute__((vector_size(L * 4)));    \
        typedef uint16_t H __attribute__((vector_size(L * 2)));    \
    };
PG_LANES(4)
PG_LANES(8)
PG_LANES(16)
#undef PG_LANES

template <int L>
using Float = typename Lanes<L>::F;

template <int L>
PG_INLINE Float<L> splat(float x) {
    return x - Float<L>{};  // minus, because x + 0 is not x when x is -0 and would have to be computed
}

// a * b + c with one rounding where the instruction set has it; units are compiled with -ffp-contract=off, so that
// this is the only place where products and sums are fused.
template <int L>
PG_INLINE Float<L> fma(Float<L> a, Float<L> b, Float<L> c) {
#if PG_FMA
    if constexpr (L == 4) {
        return _mm_fmadd_ps(a, b, c);
    } else if constexpr (L == 8) {
        return _mm256_fmadd_ps(a, b, c);
    } else {
#if PG_AVX512
        return _mm512_fmadd_ps(a, b, c);
#else
        typename Lanes<8>::F halves[3][2];
        memcpy(halves[0], &a, sizeof a);
        memcpy(halves[1], &b, sizeof b);
        memcpy(halves[2], &c, sizeof c);
        for (int h = 0; h < 2; ++h) halves[2][h] = _mm256_fmadd_ps(halves[0][h], halves[1][h], halves[2][h]);
        memcpy(&c, halves[2], sizeof c);
        return c;
#endif
    }
#else
    return a * b + c;
#endif
}

PG_INLINE float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}
PG_INLINE float widen(float x) { return x; }

// Round to nearest, ties to even; NaN stays NaN (its payload could round up to infinity).
template <int L>
PG_INLINE typename Lanes<L>::H narrow(Float<L> x) {
    typedef typename Lanes<L>::U U;
    U bits = (U)x;
    U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    U quiet = (bits >> 16) | 0x40;
    U is_nan = (U)((bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector((rounded & ~is_nan) | (quiet & is_nan), typename Lanes<L>::H);
}

template <int L>
PG_INLINE Float<L> load(const float* from) {
    Float<L> x;
    memcpy(&x, from, sizeof x);
    return x;
}

template <int L>
PG_INLINE Float<L> load(const bf16* from) {
    typename Lanes<L>::H half;
    memcpy(&half, from, sizeof half);
    return (Float<L>)(__builtin_convertvector(half, typename Lanes<L>::U) << 16);
}

template <int L>
PG_INLINE Float<L> load(const int8_t* from) {
#if PG_FMA  // gcc would take the bytes one by one
    if constexpr (L == 8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(from)));
#endif
#if PG_AVX512
    if constexpr (L == 16) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#endif
    typedef int8_t Bytes __attribute__((vector_size(L)));
    Bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, typename Lanes<L>::I), Float<L>);
}

template <int L>
PG_INLINE void store(float* to, Float<L> x) {
    memcpy(to, &x, sizeof x);
}

template <int L>
PG_INLINE void store(bf16* to, Float<L> x) {
    typename Lanes<L>::H half = narrow<L>(x);
    memcpy(to, &half, sizeof half);
}

// The first n lanes only; the others read as zero.
template <int L, class T>
PG_INLINE Float<L> load(const T* from, long n) {
    if (n >= L) return load<L>(from);
    T padded[L] = {};
    memcpy(padded, from, n * sizeof(T));
    return load<L>(padded);
}

template <int L, class T>
PG_INLINE void store(T* to, Float<L> x, long n) {
    if (n >= L) return store<L>(to, x);
    T padded[L];
    store<L>(padded, x);
    memcpy(to, padded, n * sizeof(T));
}

// x as it will be read back once it has been stored as T.
template <int L, class T>
PG_INLINE Float<L> rounded(Float<L> x) {
    T stored[L];
    store<L>(stored, x);
    return load<L>(stored);
}

template <int L>
PG_INLINE float sum(Float<L> x) {
    float lanes[L];
    memcpy(lanes, &x, sizeof x);
    for (int width = L / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
}

template <int L>
PG_INLINE Float<L> max(Float<L> a, Float<L> b) {
    return a > b ? a : b;
}

template <int L>
PG_INLINE float largest(Float<L> x) {
    float lanes[L];
    memcpy(lanes, &x, sizeof x);
    float most = lanes[0];
    for (int i = 1; i < L; ++i) most = lanes[i] > most ? lanes[i] : most;
    return most;
}

// Whether any lane of a is above b's.
template <int L>
PG_INLINE bool any_above(Float<L> a, Float<L> b) {
#if PG_FMA
    if constexpr (L == 8) return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
#endif
#if PG_AVX512
    if constexpr (L == 16) return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0;
#endif
    typename Lanes<L>::I above = a > b;
    bool any = false;
    for (int i = 0; i < L; ++i) any |= above[i] != 0;
    return any;
}

// e^x to about 2 ulp: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial in r (Cephes' coefficients), n added to the
// exponent. Arguments are clamped to where the result is a normal number; callers treat masked keys apart.
template <int L>
PG_INLINE Float<L> exp(Float<L> x) {
    typedef typename Lanes<L>::I I;
    const Float<L> shift = splat<L>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    x = x < -87.33f ? splat<L>(-87.33f) : x;
    x = x > 88.37f ? splat<L>(88.37f) : x;
    Float<L> shifted = fma<L>(x, splat<L>(1.44269504088896341f), shift);
    Float<L> n = shifted - shift;
    Float<L> r = fma<L>(n, splat<L>(-0.693359375f), x);
    r = fma<L>(n, splat<L>(2.12194440e-4f), r);
    Float<L> p = splat<L>(1.9875691500e-4f);
    p = fma<L>(p, r, splat<L>(1.3981999507e-3f));
    p = fma<L>(p, r, splat<L>(8.3334519073e-3f));
    p = fma<L>(p, r, splat<L>(4.1665795894e-2f));
    p = fma<L>(p, r, splat<L>(1.6666665459e-1f));
    p = fma<L>(p, r, splat<L>(5.0000001201e-1f));
    p = fma<L>(p, r * r, r) + 1.0f;
    I exponent = ((I)shifted - (I)shift) << 23;
    return (Float<L>)((I)p + exponent);
}

}  // namespace PG_ISA
}  // namespace pg
