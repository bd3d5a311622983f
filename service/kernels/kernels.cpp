// The CPU kernels between the matrix products of a decoder layer: norms, rotary positions, attention, activation.
//
// Law of this file: what is computed for one row depends on that row and on its context alone, never on how many other
// rows are in the call, how they are split over threads, or what lies in memory beyond the context. Reductions run in
// lanes of 16 and chunks of 256 positions counted from position 0. That is what makes greedy bf16 text the same with
// and without speculation. Storage types are bf16, float and double; bf16 is computed in float.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#ifdef __linux__
#include <omp.h>
#include <sched.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr int CHUNK = 256;
constexpr int MAX_ROWS = 8;
constexpr int64_t SMALL = 16384;  // elements below which one thread is quicker than waking another

struct bf16 {
  uint16_t bits;
};

typedef float FloatVec __attribute__((vector_size(LANES * 4)));
typedef double DoubleVec __attribute__((vector_size(LANES * 8)));
typedef uint16_t HalfBits __attribute__((vector_size(LANES * 2)));
typedef uint32_t FloatBits __attribute__((vector_size(LANES * 4)));
typedef int32_t FloatInts __attribute__((vector_size(LANES * 4)));

template <class T> struct Arithmetic;
template <> struct Arithmetic<bf16> { using Scalar = float; using Vec = FloatVec; };
template <> struct Arithmetic<float> { using Scalar = float; using Vec = FloatVec; };
template <> struct Arithmetic<double> { using Scalar = double; using Vec = DoubleVec; };
template <class T> using Scalar = typename Arithmetic<T>::Scalar;
template <class T> using Vec = typename Arithmetic<T>::Vec;

inline float widened(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float widened(float x) { return x; }
inline double widened(double x) { return x; }

inline void narrow(float value, bf16& out) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  out.bits = value != value ? 0x7FC0 : uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline void narrow(float value, float& out) { out = value; }
inline void narrow(double value, double& out) { out = value; }

template <class T> inline Scalar<T> rounded(Scalar<T> value) {
  T narrowed;
  narrow(value, narrowed);
  return widened(narrowed);
}

inline FloatVec load(const bf16* from) {
  HalfBits half;
  std::memcpy(&half, from, sizeof half);
  FloatBits bits = __builtin_convertvector(half, FloatBits) << 16;
  FloatVec value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline FloatVec load(const float* from) {
  FloatVec value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
inline DoubleVec load(const double* from) {
  DoubleVec value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class V, class A> inline void store(const V& value, A* to) { std::memcpy(to, &value, sizeof value); }

template <class V> inline auto lane_sum(const V& v) {
  auto total = v[0];
  for (int lane = 1; lane < LANES; ++lane) total += v[lane];
  return total;
}

// exp in lanes, Cephes' polynomial (about 1e-7 relative); a lane at or below -87 gives 0.
inline FloatVec vexp(FloatVec x) {
  const FloatVec lowest = FloatVec{} - 87.0f, highest = FloatVec{} + 88.0f;
  FloatInts under = x <= lowest;
  x = x < lowest ? lowest : x;
  x = x > highest ? highest : x;
  FloatVec t = x * 1.44269504088896341f;
  FloatVec half = t < 0 ? FloatVec{} - 0.5f : FloatVec{} + 0.5f;
  FloatInts n = __builtin_convertvector(t + half, FloatInts);
  FloatVec whole = __builtin_convertvector(n, FloatVec);
  x = x - whole * 0.693359375f;
  x = x + whole * 2.12194440e-4f;
  FloatVec y = x * 1.9875691500E-4f + 1.3981999507E-3f;
  y = y * x + 8.3334519073E-3f;
  y = y * x + 4.1665795894E-2f;
  y = y * x + 1.6666665459E-1f;
  y = y * x + 5.0000001201E-1f;
  y = y * x * x + x + 1.0f;
  FloatInts scale = (n + 127) << 23;
  FloatVec power;
  std::memcpy(&power, &scale, sizeof power);
  y = y * power;
  return under ? FloatVec{} : y;
}
inline DoubleVec vexp(DoubleVec x) {
  for (int lane = 0; lane < LANES; ++lane) x[lane] = std::exp(x[lane]);
  return x;
}

template <class V> inline V vtanh(V x) {
  // tanh(|x|) = (1 - e) / (1 + e), e = exp(-2|x|)
  V size = x < 0 ? -x : x;
  V e = vexp(size * -2);
  V y = (1 - e) / (1 + e);
  return x < 0 ? -y : y;
}

// ---------------------------------------------------------------- norms

enum NormMode { ROUND_THEN_SCALE = 0, ONE_PLUS = 1, SCALE_THEN_ROUND = 2 };

template <class T> Scalar<T> inverse_rms(const T* x, int64_t width, double eps) {
  Vec<T> squares{};
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) {
    Vec<T> v = load(x + i);
    squares += v * v;
  }
  Scalar<T> total = lane_sum(squares);
  for (; i < width; ++i) total += widened(x[i]) * widened(x[i]);
  return Scalar<T>(1) / std::sqrt(total / Scalar<T>(width) + Scalar<T>(eps));
}

template <class T> inline Scalar<T> normed(Scalar<T> x, Scalar<T> inverse, T weight, int mode) {
  Scalar<T> w = widened(weight);
  if (mode == ONE_PLUS) return x * inverse * (1 + w);
  if (mode == ROUND_THEN_SCALE) return rounded<T>(x * inverse) * w;
  return x * inverse * w;
}

template <class T>
void norm_row(const T* x, const T* weight, T* out, int64_t width, double eps, int mode) {
  Scalar<T> inverse = inverse_rms(x, width, eps);
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) narrow(normed<T>(widened(x[i]), inverse, weight[i], mode), out[i]);
}

// x += post_norm(branch); out = pre_norm(x). Any of branch, post_weight and pre_weight may be null.
template <class T>
void add_norm(T* x, const T* branch, const T* post, const T* pre, T* out, int64_t rows, int64_t width, double eps,
              int mode) {
#pragma omp parallel if (rows * width > SMALL)
  {
    std::vector<T> scratch(post ? width : 0);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      T* here = x + row * width;
      const T* added = branch ? branch + row * width : nullptr;
      if (added && post) {
        norm_row(added, post, scratch.data(), width, eps, mode);
        added = scratch.data();
      }
      if (added) {
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) narrow(widened(here[i]) + widened(added[i]), here[i]);
      }
      if (pre) norm_row(here, pre, out + row * width, width, eps, mode);
    }
  }
}

// ---------------------------------------------------------------- rotary positions and the KV write

template <class T> struct Rope {
  const T* qkv;
  const T* q_norm;
  const T* k_norm;
  const Scalar<T>* cosines;  // [positions, rotary]; null: no rotary positions
  const Scalar<T>* sines;
  const int64_t* positions;
  const int64_t* slots;
  T* q_out;     // [rows, heads, dim]
  T* k_blocks;  // [slots / 16, kv_heads, dim, 16]
  T* v_blocks;  // [slots / 16, kv_heads, 16, dim]
  int64_t rows, heads, kv_heads, dim, rotary;
  double eps;
  int mode, norm_whole;
};

template <class T> void rotate(T* head, const Rope<T>& r, int64_t position) {
  if (!r.cosines) return;
  const Scalar<T>* cosine = r.cosines + position * r.rotary;
  const Scalar<T>* sine = r.sines + position * r.rotary;
  int64_t half = r.rotary / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    Scalar<T> a = widened(head[i]), b = widened(head[i + half]);
    narrow(a * cosine[i] - b * sine[i], head[i]);
    narrow(b * cosine[i + half] + a * sine[i + half], head[i + half]);
  }
}

template <class T> void normed_heads(const T* from, const T* weight, T* to, int64_t count, const Rope<T>& r) {
  if (!weight) {
    std::memcpy(to, from, count * r.dim * sizeof(T));
  } else if (r.norm_whole) {
    norm_row(from, weight, to, count * r.dim, r.eps, r.mode);
  } else {
    for (int64_t h = 0; h < count; ++h) norm_row(from + h * r.dim, weight, to + h * r.dim, r.dim, r.eps, r.mode);
  }
}

template <class T> void rope_write(const Rope<T>& r) {
  int64_t stride = (r.heads + 2 * r.kv_heads) * r.dim;
#pragma omp parallel if (r.rows * stride > SMALL)
  {
    std::vector<T> keys(r.kv_heads * r.dim);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < r.rows; ++row) {
      const T* from = r.qkv + row * stride;
      T* q = r.q_out + row * r.heads * r.dim;
      normed_heads(from, r.q_norm, q, r.heads, r);
      normed_heads(from + r.heads * r.dim, r.k_norm, keys.data(), r.kv_heads, r);
      for (int64_t h = 0; h < r.heads; ++h) rotate(q + h * r.dim, r, r.positions[row]);
      int64_t block = r.slots[row] / LANES, lane = r.slots[row] % LANES;
      const T* values = from + (r.heads + r.kv_heads) * r.dim;
      for (int64_t h = 0; h < r.kv_heads; ++h) {
        rotate(keys.data() + h * r.dim, r, r.positions[row]);
        T* k = r.k_blocks + (block * r.kv_heads + h) * r.dim * LANES + lane;
        for (int64_t i = 0; i < r.dim; ++i) k[i * LANES] = keys[h * r.dim + i];
        std::memcpy(r.v_blocks + ((block * r.kv_heads + h) * LANES + lane) * r.dim, values + h * r.dim,
                    r.dim * sizeof(T));
      }
    }
  }
}

// ---------------------------------------------------------------- attention

template <class T> struct Attention {
  const T* q;         // [rows, heads, dim]
  const T* k_blocks;  // [slots / 16, kv_heads, dim, 16]
  const T* v_blocks;  // [slots / 16, kv_heads, 16, dim]
  T* out;             // [rows, heads, dim]
  const int64_t* blocks;        // 16-slot blocks of every sequence, packed
  const int64_t* block_starts;  // [sequences + 1] into blocks
  const int64_t* row_starts;    // [sequences + 1] into rows
  const int64_t* first_position;  // [sequences] position of the sequence's first row
  const int64_t* path_starts;     // [rows + 1] into path_slots; null where no sequence is a tree
  const int64_t* path_slots;      // per row of a tree, the slots of the nodes on its way: node 0's, ..., its own
  int64_t sequences, heads, kv_heads, dim, window;
  double scale, softcap;
};

// One tile: up to 8 query rows (a row is one token's one head) of one sequence and KV head.
struct Tile {
  int64_t sequence, kv_head, first, count;
};

// A row of a tree sees the context before the tree and, of the tree, the nodes on the way to it alone. They stand in for
// a chain: the node at depth i is at position first + i whatever its slot, so every sum runs as it would in the chain.
struct Path {
  const int64_t* slots;  // by depth
  int64_t first;         // position of slots[0]
  int64_t count;

  bool covers(int64_t position) const { return position >= first && position < first + count; }
};

template <class T> int64_t tile_row(const Attention<T>& a, const Tile& tile, int64_t i) {
  return a.row_starts[tile.sequence] + (tile.first + i) / (a.heads / a.kv_heads);
}

template <class T> Path path_of(const Attention<T>& a, const Tile& tile, int64_t i) {
  int64_t row = tile_row(a, tile, i), start = a.path_starts[row];
  return {a.path_slots + start, a.first_position[tile.sequence], a.path_starts[row + 1] - start};
}

template <class T> bool is_tree(const Attention<T>& a, int64_t sequence) {
  int64_t row = a.row_starts[sequence];
  return a.path_starts && a.path_starts[row + 1] > a.path_starts[row];
}

// The keys of a block as `path` sees them: `home` itself, or a copy in `scratch` with the lanes of other slots patched.
template <class T>
const T* block_keys(const Attention<T>& a, const Tile& tile, const Path& path, int64_t home, int64_t position,
                    T* scratch) {
  const T* keys = a.k_blocks + (home * a.kv_heads + tile.kv_head) * a.dim * LANES;
  bool patched = false;
  for (int64_t lane = 0; lane < LANES; ++lane) {
    if (!path.covers(position + lane)) continue;
    int64_t slot = path.slots[position + lane - path.first];
    if (slot == home * LANES + lane) continue;
    if (!patched) std::memcpy(scratch, keys, a.dim * LANES * sizeof(T));
    patched = true;
    const T* from = a.k_blocks + (slot / LANES * a.kv_heads + tile.kv_head) * a.dim * LANES + slot % LANES;
    for (int64_t d = 0; d < a.dim; ++d) scratch[d * LANES + lane] = from[d * LANES];
  }
  return patched ? scratch : keys;
}

// outputs[r] = sum over the chunk's keys of their weight times their value, in order of position. Of a tree's row,
// the values from block `shared` on lie at own[r * CHUNK + position in the chunk].
template <class T, int R, bool TREE>
void weighted_values(const Attention<T>& a, const Tile& tile, const int64_t* blocks, int64_t first_block,
                     int64_t num_blocks, int64_t num_keys, const Scalar<T>* weights, Scalar<T>* outputs,
                     int64_t shared, const T* const* own) {
  using V = Vec<T>;
  for (int64_t d = 0; d < a.dim; d += LANES) {
    V acc[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r] = V{};
    for (int64_t b = first_block; b < (TREE ? shared : num_blocks); ++b) {
      const T* values = a.v_blocks + (blocks[b] * a.kv_heads + tile.kv_head) * LANES * a.dim + d;
      int64_t count = std::min<int64_t>(LANES, num_keys - b * LANES);
      for (int64_t j = 0; j < count; ++j) {
        V v = load(values + j * a.dim);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r] += weights[r * CHUNK + b * LANES + j] * v;
      }
    }
    if constexpr (TREE)
      for (int64_t at = shared * LANES; at < num_keys; ++at) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r] += weights[r * CHUNK + at] * load(own[r * CHUNK + at] + d);
      }
    for (int r = 0; r < R; ++r) store(acc[r], outputs + r * a.dim + d);
  }
}

template <class T, int R>
inline void block_scores(const Scalar<T>* q, const T* keys, int64_t dim, Vec<T>* acc) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) acc[r] = Vec<T>{};
  for (int64_t d = 0; d < dim; ++d) {
    Vec<T> k = load(keys + d * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[r] += q[r * dim + d] * k;
  }
}

template <class T, int R>
void score_rows(const Scalar<T>* q, const T* keys, int64_t dim, int count, Vec<T>* products) {
  if constexpr (R > 0) {
    if (count == R) block_scores<T, R>(q, keys, dim, products);
    else score_rows<T, R - 1>(q, keys, dim, count, products);
  }
}

// Scores of one block from products: scaled, soft-capped, minus infinity where the row at `position` may not look.
template <class T> inline Vec<T> masked(const Attention<T>& a, Vec<T> products, int64_t here, int64_t position) {
  using A = Scalar<T>;
  using V = Vec<T>;
  V s = products * A(a.scale);
  if (a.softcap > 0) s = vtanh(V(s / A(a.softcap))) * A(a.softcap);
  bool all_seen = here + LANES - 1 <= position && (!a.window || here > position - a.window);
  if (!all_seen)
    for (int lane = 0; lane < LANES; ++lane) {
      int64_t key = here + lane;
      if (key > position || (a.window && key <= position - a.window)) s[lane] = -std::numeric_limits<A>::infinity();
    }
  return s;
}

// The blocks from `shared` on, of which each row of a tree sees its own path: scores, and where the values lie.
template <class T, int R>
void own_blocks(const Attention<T>& a, const Tile& tile, const Scalar<T>* q, const int64_t* position,
                const int64_t* blocks, int64_t begin, int64_t shared, int64_t num_blocks, int64_t num_keys,
                Scalar<T> (*scores)[CHUNK], Vec<T>* tops, const T** own) {
  using V = Vec<T>;
  thread_local std::vector<T> scratch;
  scratch.resize(a.dim * LANES);
  for (int first = 0, count; first < R; first += count) {
    for (count = 1; first + count < R && tile_row(a, tile, first + count) == tile_row(a, tile, first);) ++count;
    Path path = path_of(a, tile, first);  // the same for all heads of a row, which lie side by side
    for (int64_t b = shared; b < num_blocks; ++b) {
      int64_t here = begin + b * LANES;
      bool seen = here <= position[first];
      V products[R];
      if (seen)
        score_rows<T, R>(q + first * a.dim, block_keys(a, tile, path, blocks[b], here, scratch.data()), a.dim, count,
                         products);
      for (int r = first; r < first + count; ++r) {
        V s = V{} - std::numeric_limits<Scalar<T>>::infinity();
        if (seen) s = masked(a, products[r - first], here, position[r]);
        store(s, &scores[r][b * LANES]);
        tops[r] = s > tops[r] ? s : tops[r];
      }
    }
    for (int64_t at = shared * LANES; at < num_keys; ++at) {
      int64_t slot = blocks[at / LANES] * LANES + at % LANES;
      if (path.covers(begin + at)) slot = path.slots[begin + at - path.first];
      else if (begin + at > position[first]) slot = path.slots[0];  // its weight is zero, and something is read there
      const T* values = a.v_blocks + ((slot / LANES * a.kv_heads + tile.kv_head) * LANES + slot % LANES) * a.dim;
      for (int r = first; r < first + count; ++r) own[r * CHUNK + at] = values;
    }
  }
}

// Partial softmax of one chunk: for each row its maximum, its sum and its unnormalised output.
template <class T, int R, bool TREE>
void chunk_partial(const Attention<T>& a, const Tile& tile, const Scalar<T>* q, const int64_t* position, int64_t chunk,
                   Scalar<T>* maxima, Scalar<T>* sums, Scalar<T>* outputs) {
  using A = Scalar<T>;
  using V = Vec<T>;
  const A lowest = -std::numeric_limits<A>::infinity();
  alignas(64) A scores[R][CHUNK];
  int64_t begin = chunk * CHUNK, last = *std::max_element(position, position + R);
  int64_t end = std::min<int64_t>(begin + CHUNK, last + 1);
  int64_t low = begin;
  if (a.window) low = std::max<int64_t>(begin, *std::min_element(position, position + R) - a.window + 1);
  int64_t first_block = (low - begin) / LANES, num_blocks = (end - begin + LANES - 1) / LANES;
  const int64_t* blocks = a.blocks + a.block_starts[tile.sequence] + begin / LANES;
  V tops[R];
  for (int r = 0; r < R; ++r) tops[r] = V{} + lowest;
  int64_t shared = num_blocks;
  if constexpr (TREE)
    shared = std::clamp((a.first_position[tile.sequence] - begin) / LANES, first_block, num_blocks);
  for (int64_t b = first_block; b < shared; ++b) {
    V acc[R];
    block_scores<T, R>(q, a.k_blocks + (blocks[b] * a.kv_heads + tile.kv_head) * a.dim * LANES, a.dim, acc);
    for (int r = 0; r < R; ++r) {
      V s = masked(a, acc[r], begin + b * LANES, position[r]);
      store(s, &scores[r][b * LANES]);
      tops[r] = s > tops[r] ? s : tops[r];
    }
  }
  const T* const* own_values = nullptr;
  if constexpr (TREE) {
    thread_local std::vector<const T*> own;
    own.resize(R * CHUNK);
    own_values = own.data();
    own_blocks<T, R>(a, tile, q, position, blocks, begin, shared, num_blocks, end - begin, scores, tops, own.data());
  }
  A best[R];
  for (int r = 0; r < R; ++r) {
    best[r] = tops[r][0];
    for (int lane = 1; lane < LANES; ++lane) best[r] = tops[r][lane] > best[r] ? tops[r][lane] : best[r];
  }
  for (int r = 0; r < R; ++r) {
    maxima[r] = best[r];
    V total{};
    A shift = best[r] == lowest ? A(0) : best[r];
    for (int64_t b = first_block; b < num_blocks; ++b) {
      V p = vexp(V(load(&scores[r][b * LANES]) - shift));
      store(p, &scores[r][b * LANES]);
      total += p;
    }
    sums[r] = best[r] == lowest ? A(0) : lane_sum(total);
  }
  weighted_values<T, R, TREE>(a, tile, blocks, first_block, num_blocks, end - begin, &scores[0][0], outputs, shared,
                              own_values);
}

template <class T> struct Partials {
  std::vector<Scalar<T>> maxima, sums, outputs;  // [chunks, MAX_ROWS], same, [chunks, MAX_ROWS, dim]
  void fit(int64_t chunks, int64_t dim) {
    if (int64_t(maxima.size()) < chunks * MAX_ROWS) {
      maxima.resize(chunks * MAX_ROWS);
      sums.resize(chunks * MAX_ROWS);
    }
    if (int64_t(outputs.size()) < chunks * MAX_ROWS * dim) outputs.resize(chunks * MAX_ROWS * dim);
  }
};

template <class T> int64_t tile_positions(const Attention<T>& a, const Tile& tile, int64_t* position) {
  int64_t group = a.heads / a.kv_heads, last = 0;
  bool tree = is_tree(a, tile.sequence);
  for (int64_t i = 0; i < tile.count; ++i) {
    int64_t depth = tree ? path_of(a, tile, i).count - 1 : (tile.first + i) / group;
    position[i] = a.first_position[tile.sequence] + depth;
    last = std::max(last, position[i]);
  }
  return last;
}

template <class T> int64_t first_chunk(const Attention<T>& a, const int64_t* position, int64_t count) {
  if (!a.window) return 0;
  return std::max<int64_t>(0, *std::min_element(position, position + count) - a.window + 1) / CHUNK;
}

template <class T> int64_t query_offset(const Attention<T>& a, const Tile& tile, int64_t i) {
  int64_t group = a.heads / a.kv_heads, head = tile.kv_head * group + (tile.first + i) % group;
  return (tile_row(a, tile, i) * a.heads + head) * a.dim;
}

template <class T>
void tile_chunk(const Attention<T>& a, const Tile& tile, int64_t chunk, Scalar<T>* maxima, Scalar<T>* sums,
                Scalar<T>* outputs) {
  int64_t position[MAX_ROWS];
  tile_positions(a, tile, position);
  thread_local std::vector<Scalar<T>> q;
  q.resize(MAX_ROWS * a.dim);
  for (int64_t i = 0; i < tile.count; ++i) {
    const T* from = a.q + query_offset(a, tile, i);
    for (int64_t d = 0; d < a.dim; ++d) q[i * a.dim + d] = widened(from[d]);
  }
  // A lane of a vector never meets another row's, so splitting the rows differently changes no bit.
  int64_t done = 0;
  bool tree = is_tree(a, tile.sequence);
  auto run = [&](auto rows) {
    constexpr int R = decltype(rows)::value;
    for (; tile.count - done >= R; done += R) {
      Tile part{tile.sequence, tile.kv_head, tile.first + done, R};
      const Scalar<T>* queries = q.data() + done * a.dim;
      Scalar<T>* out = outputs + done * a.dim;
      if (tree) chunk_partial<T, R, true>(a, part, queries, position + done, chunk, maxima + done, sums + done, out);
      else chunk_partial<T, R, false>(a, part, queries, position + done, chunk, maxima + done, sums + done, out);
    }
  };
  run(std::integral_constant<int, 8>());
  run(std::integral_constant<int, 4>());
  run(std::integral_constant<int, 2>());
  run(std::integral_constant<int, 1>());
}

template <class T>
void combine(const Attention<T>& a, const Tile& tile, int64_t from_chunk, int64_t to_chunk, const Scalar<T>* maxima,
             const Scalar<T>* sums, const Scalar<T>* outputs) {
  using A = Scalar<T>;
  int64_t num = to_chunk - from_chunk;
  thread_local std::vector<A> total;
  total.resize(a.dim);
  for (int64_t i = 0; i < tile.count; ++i) {
    A best = -std::numeric_limits<A>::infinity();
    for (int64_t c = 0; c < num; ++c) best = std::max(best, maxima[c * MAX_ROWS + i]);
    A sum = 0;
    std::fill(total.begin(), total.end(), A(0));
    for (int64_t c = 0; c < num; ++c) {
      A weight = std::exp(maxima[c * MAX_ROWS + i] - best);
      if (weight == 0) continue;
      sum += weight * sums[c * MAX_ROWS + i];
      const A* part = outputs + (c * MAX_ROWS + i) * a.dim;
#pragma omp simd
      for (int64_t d = 0; d < a.dim; ++d) total[d] += weight * part[d];
    }
    T* out = a.out + query_offset(a, tile, i);
#pragma omp simd
    for (int64_t d = 0; d < a.dim; ++d) narrow(total[d] / sum, out[d]);
  }
}

template <class T> void attend(const Attention<T>& a) {
  int64_t group = a.heads / a.kv_heads;
  std::vector<Tile> tiles;
  struct Job {
    int64_t tile, chunk, place;
  };
  std::vector<Job> jobs;
  std::vector<int64_t> from_chunk, places;
  int64_t longest = 0;
  for (int64_t s = 0; s < a.sequences; ++s) {
    int64_t rows = (a.row_starts[s + 1] - a.row_starts[s]) * group;
    for (int64_t h = 0; h < a.kv_heads; ++h)
      for (int64_t first = 0; first < rows; first += MAX_ROWS) {
        tiles.push_back({s, h, first, std::min<int64_t>(MAX_ROWS, rows - first)});
      }
  }
  bool split = tiles.size() <= 64;
  int64_t position[MAX_ROWS];
  for (size_t t = 0; t < tiles.size(); ++t) {
    int64_t last = tile_positions(a, tiles[t], position);
    from_chunk.push_back(first_chunk(a, position, tiles[t].count));
    places.push_back(jobs.size());
    int64_t chunks = last / CHUNK + 1 - from_chunk.back();
    longest = std::max(longest, chunks);
    for (int64_t c = 0; c < (split ? chunks : 1); ++c) jobs.push_back({int64_t(t), from_chunk.back() + c, c});
  }
  places.push_back(jobs.size());
  if (split) {
    static thread_local Partials<T> shared;
    shared.fit(jobs.size(), a.dim);
    Partials<T>& parts = shared;
#pragma omp parallel if (jobs.size() > 1)
    {
#pragma omp for schedule(dynamic, 1)
      for (size_t j = 0; j < jobs.size(); ++j)
        tile_chunk(a, tiles[jobs[j].tile], jobs[j].chunk, &parts.maxima[j * MAX_ROWS], &parts.sums[j * MAX_ROWS],
                   &parts.outputs[j * MAX_ROWS * a.dim]);
#pragma omp for schedule(static)
      for (size_t t = 0; t < tiles.size(); ++t)
        combine(a, tiles[t], 0, places[t + 1] - places[t], &parts.maxima[places[t] * MAX_ROWS],
                &parts.sums[places[t] * MAX_ROWS], &parts.outputs[places[t] * MAX_ROWS * a.dim]);
    }
    return;
  }
#pragma omp parallel
  {
    static thread_local Partials<T> own;
    own.fit(longest, a.dim);
#pragma omp for schedule(dynamic, 4)
    for (size_t t = 0; t < tiles.size(); ++t) {
      int64_t mine[MAX_ROWS];
      int64_t chunks = tile_positions(a, tiles[t], mine) / CHUNK + 1 - from_chunk[t];
      for (int64_t c = 0; c < chunks; ++c)
        tile_chunk(a, tiles[t], from_chunk[t] + c, &own.maxima[c * MAX_ROWS], &own.sums[c * MAX_ROWS],
                   &own.outputs[c * MAX_ROWS * a.dim]);
      combine(a, tiles[t], 0, chunks, own.maxima.data(), own.sums.data(), own.outputs.data());
    }
  }
}

// Moves what layers keep of single tokens: slot from[i] to slot to[i], in order.
template <class T>
void move_slots(T* k_blocks, T* v_blocks, const int64_t* from, const int64_t* to, int64_t count, int64_t kv_heads,
                int64_t dim) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t h = 0; h < kv_heads; ++h) {
      int64_t source = (from[i] / LANES * kv_heads + h) * dim * LANES, lane = from[i] % LANES;
      int64_t target = (to[i] / LANES * kv_heads + h) * dim * LANES, to_lane = to[i] % LANES;
      for (int64_t d = 0; d < dim; ++d) k_blocks[target + d * LANES + to_lane] = k_blocks[source + d * LANES + lane];
      std::memmove(v_blocks + target + to_lane * dim, v_blocks + source + lane * dim, dim * sizeof(T));
    }
}

// ---------------------------------------------------------------- matrix product

constexpr int PANEL = 2 * LANES;  // output columns of one panel of weights
constexpr int BLOCK_ROWS = 12;    // 24 accumulators, leaving registers for the weights
constexpr int AHEAD = 4096;       // bytes to prefetch ahead: without it 1 to 9 rows took 1.1 to 2 times as long

// y = x W^T + b over panels. Every output is one accumulator that runs through k in order, so no number of rows, blocks
// or threads can change a bit of it. Products are float also for bf16 weights: two fused multiply-adds a cycle are
// quicker than the processor's bf16 dot product where that starts every other cycle, and read the same memory.
// Weights are stored as x is (S = T) or as int8, two k in a lane of four bytes; their outputs are scaled.
template <class T, class S> struct Product {
  const T* x;               // [rows, k]
  const S* panels;          // [columns / 32, k, 32]; bf16: [columns / 32, k, 16, 2], column c beside column c + 16;
                            // int8: [columns / 32, k / 2, 16, 2, 2], an odd k after an even one
  const Scalar<T>* scales;  // [columns] or null
  const T* bias;            // [columns] or null
  T* out;                   // [rows, columns]
  int64_t rows, columns, k;
};

template <class A, class V> inline void load_columns(const A* from, int, V& left, V& right) {
  left = load(from);
  right = load(from + LANES);
}
inline void load_columns(const bf16* from, int, FloatVec& left, FloatVec& right) {
  FloatBits both, high, low;
  std::memcpy(&both, from, sizeof both);
  high = both & 0xFFFF0000u;
  low = both << 16;
  std::memcpy(&left, &low, sizeof left);
  std::memcpy(&right, &high, sizeof right);
}
// Of k + step; each value is 2^24 times as large, so that a mask makes it an integer, and scales are as much smaller.
inline void load_columns(const int8_t* from, int step, FloatVec& left, FloatVec& right) {
  FloatBits four;
  std::memcpy(&four, from, sizeof four);
  FloatBits low = four << (step ? 8 : 24), high = step ? four : four << 16;
  left = __builtin_convertvector((FloatInts)(low & 0xFF000000u), FloatVec);
  right = __builtin_convertvector((FloatInts)(high & 0xFF000000u), FloatVec);
}

template <class T, class S> void finish(const Product<T, S>& p, int64_t panel, int64_t row, Scalar<T>* sums) {
  int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, p.columns - first);
  T* out = p.out + row * p.columns + first;
  if (p.scales)
    for (int64_t c = 0; c < count; ++c) sums[c] *= p.scales[first + c];
  if (p.bias) {
    for (int64_t c = 0; c < count; ++c) narrow(sums[c] + widened(p.bias[first + c]), out[c]);
  } else if (count == PANEL) {
#pragma omp simd
    for (int64_t c = 0; c < PANEL; ++c) narrow(sums[c], out[c]);
  } else {
    for (int64_t c = 0; c < count; ++c) narrow(sums[c], out[c]);
  }
}

// `weights` is a panel as stored (W = S) or already widened (W = Scalar<T>).
template <class T, class S, class W, int R>
void block_product(const Product<T, S>& p, const Scalar<T>* x, const W* weights, int64_t panel, int64_t row) {
  Vec<T> sums[R][2];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = Vec<T>{};
  const Scalar<T>* from = x + row * p.k;
  constexpr int STEPS = std::is_same<W, int8_t>::value ? 2 : 1;
  for (int64_t k = 0; k < p.k; k += STEPS) {
    __builtin_prefetch((const char*)(weights + k * PANEL) + AHEAD);
#pragma GCC unroll 2
    for (int step = 0; step < STEPS; ++step) {
      Vec<T> left, right;
      load_columns(weights + k * PANEL, step, left, right);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        sums[r][0] += from[r * p.k + k + step] * left;
        sums[r][1] += from[r * p.k + k + step] * right;
      }
    }
  }
  for (int r = 0; r < R; ++r) finish(p, panel, row + r, (Scalar<T>*)&sums[r][0]);
}

template <class T, class S, class W, int R>
void dispatch(const Product<T, S>& p, const Scalar<T>* x, const W* weights, int64_t panel, int64_t row, int64_t count) {
  if constexpr (R > 0) {
    if (count == R) block_product<T, S, W, R>(p, x, weights, panel, row);
    else dispatch<T, S, W, R - 1>(p, x, weights, panel, row, count);
  }
}

template <class T, class S> void product(const Product<T, S>& p) {
  if (p.rows == 0) return;
  using A = Scalar<T>;
  constexpr bool narrow_storage = !std::is_same<S, A>::value;
  int64_t panels = (p.columns + PANEL - 1) / PANEL;
  int64_t blocks = (p.rows + BLOCK_ROWS - 1) / BLOCK_ROWS, height = (p.rows + blocks - 1) / blocks;
  std::vector<A> wide;
  const A* x;
  if constexpr (!std::is_same<T, A>::value) {
    wide.resize(p.rows * p.k);
#pragma omp parallel for simd schedule(static) if (p.rows * p.k > SMALL)
    for (int64_t i = 0; i < p.rows * p.k; ++i) wide[i] = widened(p.x[i]);
    x = wide.data();
  } else {
    x = p.x;
  }
  // Dynamic: the engine's own thread may hold a core for a moment, and then the others take its panels.
  int64_t share = std::max<int64_t>(1, panels / 32);
#pragma omp parallel if (panels * p.k * p.rows > SMALL)
  {
    std::vector<A> widened_panel(narrow_storage && blocks > 2 ? p.k * PANEL : 0);
#pragma omp for schedule(dynamic, share)
    for (int64_t panel = 0; panel < panels; ++panel) {
      const S* stored = p.panels + panel * p.k * PANEL;
      bool widen = !widened_panel.empty();
      if (widen)
        for (int64_t k = 0; k < p.k; ++k) {
          Vec<T> left, right;
          int step = std::is_same<S, int8_t>::value ? k % 2 : 0;
          load_columns(stored + (k - step) * PANEL, step, left, right);
          store(left, &widened_panel[k * PANEL]);
          store(right, &widened_panel[k * PANEL + LANES]);
        }
      for (int64_t row = 0; row < p.rows; row += height) {
        int64_t count = std::min<int64_t>(height, p.rows - row);
        if (widen) dispatch<T, S, A, BLOCK_ROWS>(p, x, widened_panel.data(), panel, row, count);
        else dispatch<T, S, S, BLOCK_ROWS>(p, x, stored, panel, row, count);
      }
    }
  }
}

// ---------------------------------------------------------------- activation and argmax

enum Activation { SILU = 0, GELU_TANH = 1 };

template <class V> inline V activated(V x, int kind) {
  if (kind == SILU) return x / (1 + vexp(-x));
  return x * (V{} + 1 + vtanh(V((x + x * x * x * 0.044715) * 0.7978845608028654))) / 2;
}
template <> inline FloatVec activated(FloatVec x, int kind) {
  if (kind == SILU) return x / (1 + vexp(-x));
  return x * (1 + vtanh(FloatVec((x + x * x * x * 0.044715f) * 0.7978845608028654f))) * 0.5f;
}

// out = act(gate) * up; gate and up lie side by side in a row of 2 * width.
template <class T> void gated(const T* gate_up, T* out, int64_t rows, int64_t width, int kind) {
#pragma omp parallel for schedule(static) if (rows * width > SMALL / 4)
  for (int64_t row = 0; row < rows; ++row) {
    const T* gate = gate_up + row * 2 * width;
    const T* up = gate + width;
    for (int64_t i = 0; i < width; i += LANES) {
      Vec<T> g = activated(load(gate + i), kind), u = load(up + i);
      for (int lane = 0; lane < LANES; ++lane) narrow(rounded<T>(g[lane]) * u[lane], out[row * width + i + lane]);
    }
  }
}

// The lowest index of each row's largest value; a NaN is never the largest.
template <class T> void argmax_rows(const T* logits, int64_t* out, int64_t rows, int64_t width) {
  constexpr int64_t PART = 8192;
  int64_t parts = (width + PART - 1) / PART;
  std::vector<int64_t> best(rows * parts);
#pragma omp parallel for schedule(static) if (rows * width > SMALL)
  for (int64_t job = 0; job < rows * parts; ++job) {
    const T* row = logits + job / parts * width;
    int64_t begin = job % parts * PART, end = std::min(width, begin + PART);
    Scalar<T> top = -std::numeric_limits<Scalar<T>>::infinity();
#pragma omp simd reduction(max : top)
    for (int64_t i = begin; i < end; ++i) top = widened(row[i]) > top ? widened(row[i]) : top;
    int64_t at = begin;
    while (at + 1 < end && !(widened(row[at]) == top)) ++at;
    best[job] = at;
  }
  for (int64_t row = 0; row < rows; ++row) {
    int64_t at = best[row * parts];
    for (int64_t p = 1; p < parts; ++p) {
      int64_t other = best[row * parts + p];
      if (widened(logits[row * width + other]) > widened(logits[row * width + at])) at = other;
    }
    out[row] = at;
  }
}

// ---------------------------------------------------------------- Gumbel-max

inline uint64_t mixed(uint64_t state) {
  state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9ull;
  state = (state ^ state >> 27) * 0x94D049BB133111EBull;
  return state ^ state >> 31;
}

// The lowest index of the largest score + Gumbel noise, noise being a hash of the row's key and the index (noise.py).
// A token can only win if 1 - u < exp(score - best so far), as 1 - exp(-x) <= x: two logarithms are spent on few tokens.
template <class T> void gumbel_argmax(const T* scores, const int64_t* keys, int64_t* out, int64_t rows, int64_t width) {
  constexpr int64_t PART = 16384;
  constexpr int64_t STRIP = 64;
  int64_t parts = (width + PART - 1) / PART;
  std::vector<int64_t> winners(rows * parts);
  std::vector<double> values(rows * parts);
#pragma omp parallel for schedule(dynamic, 1) if (rows * width > SMALL)
  for (int64_t job = 0; job < rows * parts; ++job) {
    const T* row = scores + job / parts * width;
    int64_t begin = job % parts * PART, end = std::min(width, begin + PART);
    uint64_t key = uint64_t(keys[job / parts]);
    double best = -std::numeric_limits<double>::infinity();
    int64_t winner = begin;
    uint64_t bits[STRIP];
    float rest[STRIP], gap[STRIP];
    for (int64_t first = begin; first < end; first += STRIP) {
      int64_t count = std::min(STRIP, end - first);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) bits[i] = mixed(key + uint64_t(first + i + 1) * 0x9E3779B97F4A7C15ull) >> 12;
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        rest[i] = float(1.0 - (double(bits[i]) + 0.5) * 0x1p-52);
        gap[i] = float(row[first + i] - best);
      }
      for (int64_t i = count; i < STRIP; ++i) gap[i] = rest[i] = 1;
      for (int64_t i = 0; i < STRIP; i += LANES) {
        FloatVec chance = vexp(load(gap + i) + 1e-3f);  // the margin covers the rounding of gap, rest and vexp
        FloatInts open = load(rest + i) <= chance;
        for (int64_t lane = i; lane < std::min<int64_t>(count, i + LANES); ++lane) {
          if (!open[lane - i]) continue;
          double value = row[first + lane] - std::log(-std::log((double(bits[lane]) + 0.5) * 0x1p-52));
          if (value > best) {
            best = value;
            winner = first + lane;
          }
        }
      }
    }
    winners[job] = winner;
    values[job] = best;
  }
  for (int64_t row = 0; row < rows; ++row) {
    int64_t at = row * parts;
    for (int64_t p = 1; p < parts; ++p)
      if (values[row * parts + p] > values[at]) at = row * parts + p;
    out[row] = winners[at];
  }
}

}  // namespace

#define FOR_DTYPE(dtype, BODY)                 \
  switch (dtype) {                             \
    case 0: { using T = bf16; BODY; break; }   \
    case 1: { using T = float; BODY; break; }  \
    case 2: { using T = double; BODY; break; } \
  }

extern "C" {

// Binds thread i of the calling thread's OpenMP pool to processor cpus[i].
void specserve_bind_threads(const int64_t* cpus, int64_t count) {
#ifdef __linux__
#pragma omp parallel num_threads(count)
  {
    cpu_set_t only;
    CPU_ZERO(&only);
    CPU_SET(cpus[omp_get_thread_num()], &only);
    sched_setaffinity(0, sizeof(only), &only);
  }
#endif
}

void specserve_add_norm(int dtype, void* x, const void* branch, const void* post, const void* pre, void* out,
                        int64_t rows, int64_t width, double eps, int mode) {
  FOR_DTYPE(dtype, add_norm((T*)x, (const T*)branch, (const T*)post, (const T*)pre, (T*)out, rows, width, eps, mode))
}

void specserve_rope_write(int dtype, const void* qkv, const void* q_norm, const void* k_norm, const void* cosines,
                          const void* sines, const int64_t* positions, const int64_t* slots, void* q_out,
                          void* k_blocks, void* v_blocks, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
                          int64_t rotary, double eps, int mode, int norm_whole) {
  FOR_DTYPE(dtype, rope_write(Rope<T>{(const T*)qkv, (const T*)q_norm, (const T*)k_norm, (const Scalar<T>*)cosines,
                                      (const Scalar<T>*)sines, positions, slots, (T*)q_out, (T*)k_blocks, (T*)v_blocks,
                                      rows, heads, kv_heads, dim, rotary, eps, mode, norm_whole}))
}

void specserve_attend(int dtype, const void* q, const void* k_blocks, const void* v_blocks, void* out,
                      const int64_t* blocks, const int64_t* block_starts, const int64_t* row_starts,
                      const int64_t* first_position, const int64_t* path_starts, const int64_t* path_slots,
                      int64_t sequences, int64_t heads, int64_t kv_heads, int64_t dim, int64_t window, double scale,
                      double softcap) {
  FOR_DTYPE(dtype, attend(Attention<T>{(const T*)q, (const T*)k_blocks, (const T*)v_blocks, (T*)out, blocks,
                                       block_starts, row_starts, first_position, path_starts, path_slots, sequences,
                                       heads, kv_heads, dim, window, scale, softcap}))
}

void specserve_move_slots(int dtype, void* k_blocks, void* v_blocks, const int64_t* from, const int64_t* to,
                          int64_t count, int64_t kv_heads, int64_t dim) {
  FOR_DTYPE(dtype, move_slots((T*)k_blocks, (T*)v_blocks, from, to, count, kv_heads, dim))
}

void specserve_product(int dtype, const void* x, const void* panels, const void* bias, void* out, int64_t rows,
                       int64_t columns, int64_t k) {
  FOR_DTYPE(dtype, product(Product<T, T>{(const T*)x, (const T*)panels, nullptr, (const T*)bias, (T*)out, rows, columns,
                                         k}))
}

void specserve_product_int8(int dtype, const void* x, const int8_t* panels, const float* scales, const void* bias,
                            void* out, int64_t rows, int64_t columns, int64_t k) {
  if (dtype == 0)
    product(Product<bf16, int8_t>{(const bf16*)x, panels, scales, (const bf16*)bias, (bf16*)out, rows, columns, k});
  if (dtype == 1)
    product(Product<float, int8_t>{(const float*)x, panels, scales, (const float*)bias, (float*)out, rows, columns, k});
}

void specserve_gated(int dtype, const void* gate_up, void* out, int64_t rows, int64_t width, int kind) {
  FOR_DTYPE(dtype, gated((const T*)gate_up, (T*)out, rows, width, kind))
}

void specserve_gumbel_argmax(int dtype, const void* scores, const int64_t* keys, int64_t* out, int64_t rows,
                             int64_t width) {
  if (dtype == 1) gumbel_argmax((const float*)scores, keys, out, rows, width);
  if (dtype == 2) gumbel_argmax((const double*)scores, keys, out, rows, width);
}

void specserve_argmax(int dtype, const void* logits, int64_t* out, int64_t rows, int64_t width) {
  FOR_DTYPE(dtype, argmax_rows((const T*)logits, out, rows, width))
}
}
