// Interface of the feedforward engines (dense, row, tile): one forward and one backward function per engine, except
// that the row engine has no backward pass. Nothing here depends on torch. The header separates two layers. The code
// above it (bindings.cpp, and through it Python) knows tensors and policy. The code below it (portable/, sm90/) knows
// how a pass is divided into kernels, in which order they are launched, and how every buffer between them is laid out.
//
// The caller provides all memory: the results, a workspace of `..._workspace_bytes(...)` bytes, and, if a backward pass
// follows, one saved buffer of `tile_saved_bytes(...)` bytes. The workspace and the saved buffer must be 256-byte
// aligned; their initial contents do not matter. Every function launches on `stream` of the current device, waits for
// nothing, allocates nothing, and returns cudaSuccess or the first error. Tensors must be contiguous and 16-byte
// aligned; bf16 pointers are void*.
//
// Letters: M tokens, K model width, N neurons; K and N are multiples of 8 up to 65,536.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace sparsellm {

// The packed format (README.md).
constexpr int kTokenTile = 128;                         // tokens per token tile
constexpr int kColumnTile = 256;                        // columns per column tile, and per segment
constexpr int kCompression = 8;                         // columns per word of a packed segment
constexpr int kTileWords = kColumnTile / kCompression;  // W, the number of words of a segment
constexpr int kSectorWords = 8;  // contiguous words of a segment: 32 bytes, one memory sector

// Numbers of tokens at which the row engine changes its method. sparsellm/ops/borders.py has the same numbers; loading
// the library checks that both agree (bindings.cpp: limit). Up to kFewTokens tokens, rows are dealt to clusters one by
// one. Above kFewTokens and below kManyTokens, the caller's library computes the gate product, and the rows are divided
// into runs of equal cost, one run per cluster. From kManyTokens on, the tile engine may compute the call instead.
constexpr int kFewTokens = 64;
constexpr int kManyTokens = 1536;

// The operands of a gate product in FP8 (e4m3), with a scale per row: z[m, n] = x_scales[m] w_scales[n] (x w^T)[m, n].
struct Float8Gate {
  const void* x;          // e4m3 [M, K]; K is a multiple of 16
  const float* x_scales;  // [M]
  const void* w;          // e4m3 [N, K]
  const float* w_scales;  // [N]
};

// The scales of e4m3 weights [N, K] of a layer whose x is bf16: neuron n's row of a weight is its scale times its e4m3
// values. A row of w_down_t has no scale of its own. Because y is linear in h, its scale is a factor of another: of the
// multiplier's, or of the thresholded weight's in a non-gated layer. So h, and l1 with it, includes that scale.
struct Float8Scales {
  const float* thresholded;  // [N] of Layer::thresholded()
  const float* multiplier;   // [N] of Layer::multiplier(), or null
};

// One call of a layer. Gated: h = relu(x w_gate^T) * (x w_up^T). Non-gated (w_gate null): h = relu(x w_up^T).
struct Layer {
  const void* x;         // bf16 [M, K]
  const void* w_gate;    // bf16 [N, K], or null
  const void* w_up;      // bf16 [N, K]
  const void* w_down_t;  // bf16 [N, K]: W_d stored by neuron
  int64_t m, k, n;
  // If not null, tile_forward computes the thresholded product from these. The tokens of the overflow path are the
  // exception: both passes compute their product in bf16.
  const Float8Gate* float8 = nullptr;
  // If not null, row_forward reads e4m3 weights; M is at most kFewTokens, and K at most 4,096 and a multiple of 16.
  const Float8Scales* scales = nullptr;

  bool gated() const { return w_gate != nullptr; }
  const void* thresholded() const { return gated() ? w_gate : w_up; }  // the weight whose product passes the ReLU
  const void* multiplier() const { return gated() ? w_up : nullptr; }  // the weight whose product multiplies g
};

// What a forward pass returns. The kCounts entries of counts are:
//   0  nonzeros of the gate
//   1  segments of the packed gate whose nonzeros did not fit in their words
//   2  1 if the call exceeded the capacity of the tile engine's lists, so that the slower overflow path computed some
//      of its token tiles, else 0
//   3  neurons that fire in each token tile, summed over the tiles
//   4  token tiles that the overflow path computed
// `counts` must have counts_length() entries, because the kernels' own counters follow these.
constexpr int kCounts = 5;
struct Result {
  void* y;         // bf16 [M, K]
  float* l1;       // float32 [1]: sum of |h|
  uint8_t* fired;  // [N], 8-byte aligned: 1 if the neuron fires for some token, else 0
  int64_t* counts;
};
int64_t counts_length();
// For a caller that does not read the statistics: returns a Result whose statistics are written to `memory`, which must
// be 256-byte aligned and have statistics_bytes(N) bytes.
int64_t statistics_bytes(int64_t n);
Result with_statistics_in(void* memory, int64_t n, void* y);

// Plain matrix products are computed by the caller's library: Multiply is the callback, and Matrix describes an
// operand.
//
// A bf16 matrix [rows, columns], stored row by row or column by column.
struct Matrix {
  const void* data;
  int64_t rows, columns;
  bool by_column;
};
class Multiply {
 public:
  // Computes out = a b, or out = out + a b if `add` is true. `out` is stored row by row. May throw.
  virtual void operator()(const Matrix& a, const Matrix& b, void* out, bool add) const = 0;

 protected:
  ~Multiply() = default;
};

// The row engine multiplies each token by the weight rows of only those neurons that fire for the token. It has no
// backward pass.
int64_t row_workspace_bytes(int64_t m, int64_t k, int64_t n);
cudaError_t row_forward(const Layer& layer, const Multiply& multiply, void* workspace, const Result& result,
                        cudaStream_t stream);

// The tile engine multiplies each tile of 128 tokens by the weight rows of the neurons that fire in the tile
// (README.md). The sizes of its buffers depend on a TileShape alone.
struct TileShape {
  int64_t m, k, n;
  bool gated;
  int64_t capacity;       // nonzeros that the lists hold; of a batch with more, some tiles take the overflow path (all
                          // tiles, if in addition the values of wide segments exceed their own memory)
  int64_t long_capacity;  // how many of these nonzeros may be in rows of more than 512 nonzeros
  bool ordered;           // tokens are reordered, so that the tokens of a tile fire similar neurons
};
// The shape whose lists hold `capacity` nonzeros (1 to tile_max_capacity(); rounded up to a multiple of 128).
// long_capacity -1: all of these nonzeros may be in long rows, as far as the kernels can count the words in 32 bits.
TileShape tile_shape(int64_t m, int64_t k, int64_t n, bool gated, int64_t capacity, int64_t long_capacity,
                     bool ordered);
int64_t tile_max_tokens(bool saving);  // the largest M; saving: a backward pass follows
int64_t tile_max_capacity();
int64_t tile_workspace_bytes(const TileShape& shape, bool saving);
// The number of bytes of a saved buffer. This number modulo 16 identifies the engine that filled the buffer: 0 is
// dense, 2 is tile with tokens in their original order, 6 is tile with ordered tokens. So tile_shape_of_saved recovers
// the shape from the length alone, or returns capacity -1 if tile_forward never saves that many bytes for such a layer.
int64_t tile_saved_bytes(const TileShape& shape);
TileShape tile_shape_of_saved(int64_t length, int64_t m, int64_t k, int64_t n, bool gated);
// saved: where to write what tile_backward needs, or null.
cudaError_t tile_forward(const Layer& layer, const TileShape& shape, void* workspace, void* saved, const Result& result,
                         cudaStream_t stream);

// Where a backward pass writes the gradients. The pass computes the gradients from dy, bf16 [M, K], and dl1, float32
// [1].
struct Gradients {
  void* dx;               // bf16 [M, K]
  void *dw_gate, *dw_up;  // [N, K]; dw_gate: null if the layer is non-gated
  void* dw_down;          // [K, N]
  bool float_weights;     // the gradients of the weights are float32, which only tile_backward supports; else bf16
  bool add;               // adds to the gradients of the weights, which must be float32, instead of overwriting them
};
int64_t tile_backward_workspace_bytes(const TileShape& shape, bool float_weights);
cudaError_t tile_backward(const Layer& layer, const TileShape& shape, const void* dy, const float* dl1, void* saved,
                          void* workspace, const Gradients& gradients, cudaStream_t stream);

// Finds a field of the tile plan in a saved buffer by the field's name in README.md, for tests of single stages.
// element_bytes is 0 if no field has that name.
struct Field {
  int64_t offset, count;  // offset in bytes, count in elements
  int element_bytes;
};
Field tile_saved_field(const TileShape& shape, const char* name);

// The dense engine: the caller's library computes plain matrix products, and kernels compute everything between them.
// fused: for many tokens, one kernel computes h, and one computes dz, du and h from dy w_down, so that dh is never in
// global memory. Not fused: for few tokens, nearly all time is spent in the products, so the library computes them, and
// elementwise kernels compute h, dz and du.
// The saved buffer has g and, in a gated layer, u, each bf16 [M, N]. If not fused, the saved buffer has z (the value
// before the ReLU) instead of g. w_down: bf16 [K, N]. A forward pass that is not fused may skip its statistics: then
// l1, fired and counts are null.
int64_t dense_saved_bytes(const Layer& layer);
int64_t dense_workspace_bytes(const Layer& layer, bool fused, bool saving);
cudaError_t dense_forward(const Layer& layer, const void* w_down, bool fused, const Multiply& multiply, void* workspace,
                          void* saved, const Result& result, cudaStream_t stream);
int64_t dense_backward_workspace_bytes(const Layer& layer);
cudaError_t dense_backward(const Layer& layer, const void* w_down, bool fused, const Multiply& multiply, const void* dy,
                           const float* dl1, const void* saved, void* workspace, const Gradients& gradients,
                           cudaStream_t stream);

// relu(x w^T) in the packed format (README.md), which the row engine and the tile engine read.
struct PackedGate {
  uint32_t* words;      // [M, 4, ceil(N / 256), 8]
  void* wide;           // bf16 [M N]
  uint32_t* mask;       // [ceil(M / 128), 8 ceil(N / 256)]
  int32_t* row_counts;  // [row_counts_length(M, N)]; the first M are the nonzeros of each token, the others are scratch
  uint8_t* fired;       // fired and counts are as in Result
  int64_t* counts;
};
int64_t row_counts_length(int64_t m, int64_t n);
cudaError_t pack(const void* x, const void* w, int64_t m, int64_t k, int64_t n, const PackedGate& out,
                 cudaStream_t stream);

// The same for e4m3 operands.
cudaError_t pack_float8(const Float8Gate& gate, int64_t m, int64_t k, int64_t n, const PackedGate& out,
                        cudaStream_t stream);

// Rounds a bf16 matrix [rows, columns] to e4m3, with a scale per row, its largest magnitude / 448. columns is a
// multiple of 8. values: e4m3 [rows, columns]; scales: [rows].
cudaError_t quantize_rows(const void* from, int64_t rows, int64_t columns, void* values, float* scales,
                          cudaStream_t stream);

// Writes the transpose of `from` [rows, columns] to `to` [columns, rows]. Each matrix is float32 or bf16; bf16 to
// float32 returns cudaErrorInvalidValue. rows and columns must be multiples of 8.
cudaError_t transpose(const void* from, bool from_float, int64_t rows, int64_t columns, void* to, bool to_float,
                      cudaStream_t stream);
// Adds the transpose of `from`, float32, to `to`, float32.
cudaError_t add_transpose(const void* from, int64_t rows, int64_t columns, void* to, cudaStream_t stream);

}  // namespace sparsellm
