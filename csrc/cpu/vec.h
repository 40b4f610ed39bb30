// Vectors of one instruction set, as accumulated (float or double lanes), and their loads and stores from every dtype.
// No include guard: each instruction set includes this inside a namespace of its own, after VECTOR_BYTES is defined and
// the compiler's target is set. Nothing here calls a function of the standard library: the linker would be free to
// merge such a function, compiled for AVX, into code that runs on any machine.

template <typename Lane, int lanes_>
struct Register {
  typedef Lane type __attribute__((vector_size(lanes_ * sizeof(Lane))));
};

template <typename T>
struct Element {  // float16 and bfloat16 accumulate in float
  typedef float Sum;
};
template <>
struct Element<double> {
  typedef double Sum;
};

template <typename T>
using Sum = typename Element<T>::Sum;
template <typename T>
constexpr int lanes_of = VECTOR_BYTES / static_cast<int>(sizeof(Sum<T>));
template <typename T>
using Vec = typename Register<Sum<T>, lanes_of<T>>::type;
using Floats = Vec<float>;
using Words = typename Register<uint32_t, lanes_of<float>>::type;
using Halves = typename Register<uint16_t, lanes_of<float>>::type;

template <typename To, typename From>
DEPTHCONV_INLINE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
template <typename V>
DEPTHCONV_INLINE V load_bits(const void* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}
template <typename V>
DEPTHCONV_INLINE void store_bits(void* to, const V& value) {
  __builtin_memcpy(to, &value, sizeof value);
}

// The first `count` lanes from memory, zeros after them; nothing beyond is read.
template <typename V, typename Unit>
DEPTHCONV_INLINE V load_part(const Unit* from, int count) {
#if VECTOR_BYTES == 64
  const unsigned mask = (1u << count) - 1;
  if constexpr (sizeof(Unit) == 8) return bits_as<V>(_mm512_maskz_loadu_epi64(static_cast<__mmask8>(mask), from));
  if constexpr (sizeof(Unit) == 4) return bits_as<V>(_mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask), from));
  if constexpr (sizeof(Unit) == 2) return bits_as<V>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), from));
#elif VECTOR_BYTES == 32
  static const int32_t ones[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  if constexpr (sizeof(Unit) == 8) {
    const __m256i mask = load_bits<__m256i>(ones + 8 - 2 * count);
    return bits_as<V>(_mm256_maskload_pd(reinterpret_cast<const double*>(from), mask));
  } else if constexpr (sizeof(Unit) == 4) {
    const __m256i mask = load_bits<__m256i>(ones + 8 - count);
    return bits_as<V>(_mm256_maskload_ps(reinterpret_cast<const float*>(from), mask));
  } else {
    uint64_t low, high = 0;  // two overlapping loads, the second shifted into place
    if (count >= 4) {
      low = load_bits<uint64_t>(from);
      if (count > 4) high = load_bits<uint64_t>(from + count - 4) >> (16 * (8 - count));
    } else {
      low = from[0];
      if (count >= 2) low |= static_cast<uint64_t>(from[1]) << 16;
      if (count == 3) low |= static_cast<uint64_t>(from[2]) << 32;
    }
    const uint64_t both[2] = {low, high};
    return bits_as<V>(_mm_set_epi64x(static_cast<long long>(both[1]), static_cast<long long>(both[0])));
  }
#else
  V value = {};
  for (int i = 0; i < static_cast<int>(sizeof(V) / sizeof(Unit)); ++i)
    if (i < count) value[i] = from[i];
  return value;
#endif
}

// The first `count` lanes to memory, in pieces of halving size; nothing beyond is written.
template <typename V, typename Unit>
DEPTHCONV_INLINE void store_part(Unit* to, const V& value, int count) {
#if VECTOR_BYTES == 64
  const unsigned mask = (1u << count) - 1;
  if constexpr (sizeof(Unit) == 8)
    return _mm512_mask_storeu_epi64(to, static_cast<__mmask8>(mask), bits_as<__m512i>(value));
  if constexpr (sizeof(Unit) == 4)
    return _mm512_mask_storeu_epi32(to, static_cast<__mmask16>(mask), bits_as<__m512i>(value));
  if constexpr (sizeof(Unit) == 2)
    return _mm256_mask_storeu_epi16(to, static_cast<__mmask16>(mask), bits_as<__m256i>(value));
#endif
  constexpr int lanes = sizeof(V) / sizeof(Unit);
  Unit lane[lanes];
  store_bits(lane, value);
  int at = 0;
  if constexpr (lanes > 8)
    if (count & 8) __builtin_memcpy(to + at, lane + at, 8 * sizeof(Unit)), at += 8;
  if constexpr (lanes > 4)
    if (count & 4) __builtin_memcpy(to + at, lane + at, 4 * sizeof(Unit)), at += 4;
  if constexpr (lanes > 2)
    if (count & 2) __builtin_memcpy(to + at, lane + at, 2 * sizeof(Unit)), at += 2;
  if (count & 1) to[at] = lane[at];
}

DEPTHCONV_INLINE Floats widen(const Halves& halves, BFloat16) {
  return bits_as<Floats>(__builtin_convertvector(halves, Words) << 16);
}
DEPTHCONV_INLINE Halves narrow(const Floats& value, BFloat16) {
  const Words bits = bits_as<Words>(value);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words nan = ((bits >> 16) & 0x8000) | 0x7fc0;
  return __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded, Halves);
}

#if VECTOR_BYTES == 64
DEPTHCONV_INLINE Floats widen(const Halves& halves, Float16) {
  return bits_as<Floats>(_mm512_maskz_cvtph_ps(0xffff, bits_as<__m256i>(halves)));
}
DEPTHCONV_INLINE Halves narrow(const Floats& value, Float16) {
  constexpr int rounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return bits_as<Halves>(_mm512_maskz_cvtps_ph(0xffff, bits_as<__m512>(value), rounding));
}
#elif VECTOR_BYTES == 32
DEPTHCONV_INLINE Floats widen(const Halves& halves, Float16) {
  return bits_as<Floats>(_mm256_cvtph_ps(bits_as<__m128i>(halves)));
}
DEPTHCONV_INLINE Halves narrow(const Floats& value, Float16) {
  return bits_as<Halves>(_mm256_cvtps_ph(bits_as<__m256>(value), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
DEPTHCONV_INLINE Floats widen(const Halves& halves, Float16) {
  const Words half = __builtin_convertvector(halves, Words);
  const Words magnitude = (half & 0x7fff) << 13;
  // Scaling by 2^112 moves the exponent's bias from 15 to 127 and is exact, subnormals included.
  const Words finite = bits_as<Words>(bits_as<Floats>(magnitude) * 0x1p112f);
  const Words special = magnitude | 0x7f800000;
  return bits_as<Floats>((magnitude >= 0x0f800000 ? special : finite) | ((half & 0x8000) << 16));
}
DEPTHCONV_INLINE Halves narrow(const Floats& value, Float16) {
  const Words bits = bits_as<Words>(value);
  const Words magnitude = bits & 0x7fffffff;
  const Words normal = (magnitude + 0xfff + ((magnitude >> 13) & 1) - (112u << 23)) >> 13;
  // Next to 0.5 the spacing of floats is that of float16's subnormals: the addition rounds.
  const Words tiny = bits_as<Words>(bits_as<Floats>(magnitude) + 0.5f) - 0x3f000000;
  const Words large = magnitude > 0x7f800000 ? (magnitude & 0) + 0x7e00 : (magnitude & 0) + 0x7c00;
  const Words finite = magnitude < 0x38800000 ? tiny : normal;
  return __builtin_convertvector((magnitude >= 0x477ff000 ? large : finite) | ((bits >> 16) & 0x8000), Halves);
}
#endif

// One vector from or to T elements: all lanes, or with full = false the first `count`.
template <bool full, typename T>
DEPTHCONV_INLINE Vec<T> load(const T* from, int count = 0) {
  if constexpr (sizeof(T) == 2) {
    const uint16_t* bits = reinterpret_cast<const uint16_t*>(from);
    return widen(full ? load_bits<Halves>(bits) : load_part<Halves>(bits, count), T());
  } else {
    return full ? load_bits<Vec<T>>(from) : load_part<Vec<T>>(from, count);
  }
}
template <bool full, typename T>
DEPTHCONV_INLINE void store(T* to, const Vec<T>& value, int count = 0) {
  if constexpr (sizeof(T) == 2) {
    uint16_t* bits = reinterpret_cast<uint16_t*>(to);
    const Halves halves = narrow(value, T());
    if (full) store_bits(bits, halves);
    else store_part(bits, halves, count);
  } else {
    if (full) store_bits(to, value);
    else store_part(to, value, count);
  }
}
template <typename T>
DEPTHCONV_INLINE Vec<T> splat(Sum<T> value) {
  return value - Vec<T>{};  // which is value, -0 and NaN included: no arithmetic is left of it
}
// Whether a comparison holds for any lane.
template <typename Mask>
DEPTHCONV_INLINE bool any(const Mask& mask) {
  uint64_t word[sizeof(Mask) / 8], some = 0;
  store_bits(word, mask);
  for (uint64_t each : word) some |= each;
  return some != 0;
}
