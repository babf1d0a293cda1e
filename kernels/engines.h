// The feedforward engines, one forward and one backward function each, free of torch. This header is the seam: what
// stands above it (bindings.cpp, and through it Python) knows tensors and policy; what stands below it (sm90/) knows
// how a pass is cut into kernels, in which order they are launched, and how every buffer between them is laid out.
//
// A caller provides memory: the results, a workspace of `..._workspace(...)` bytes, and for the backward pass one
// buffer of `tile_saved_bytes(...)` bytes. Workspace and saved buffer are 256-byte aligned and undefined at first.
// Every function launches on `stream` of the current device, waits for nothing, allocates nothing, and returns
// cudaSuccess or the first error. Tensors are contiguous and 16-byte aligned; bf16 pointers are void*.
//
// Letters: M tokens, K model width, N neurons; K and N are multiples of 8 up to 65,536.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace sparsellm {

// The packed format (README.md).
constexpr int kTokenTile = 128;                         // tokens of a token tile
constexpr int kColumnTile = 256;                        // columns of a TwELL tile, the gate product's own N tile
constexpr int kCompression = 8;                         // columns for each word of a packed segment
constexpr int kTileWords = kColumnTile / kCompression;  // W
constexpr int kSectorWords = 8;  // of the packed gate, side by side: 32 bytes, what memory is read in

// One call of a layer. Gated: h = relu(x w_gate^T) * (x w_up^T); not gated (w_gate null): h = relu(x w_up^T).
struct Layer {
  const void* x;         // bf16 [M, K]
  const void* w_gate;    // bf16 [N, K], or null
  const void* w_up;      // bf16 [N, K]
  const void* w_down_t;  // bf16 [N, K]: W_d by neuron
  int64_t m, k, n;

  bool gated() const { return w_gate != nullptr; }
  const void* thresholded() const { return gated() ? w_gate : w_up; }  // the weight whose product passes the ReLU
  const void* multiplier() const { return gated() ? w_up : nullptr; }  // the weight whose product g is multiplied by
};

// What a forward pass returns. counts: the nonzeros of the gate; the segments of its packed form that did not fit their
// words; 1 where the tile engine's lists had no room, so that slower kernels computed the call, else 0; and the neurons
// that fire in each token tile, summed over the tiles. Behind these four, counts has room for what the kernels count
// for themselves: counts_length() integers in all.
struct Result {
  void* y;         // bf16 [M, K]
  float* l1;       // float32 [1]: sum of |h|
  uint8_t* fired;  // [N], 8-byte aligned: 1 where the neuron fires for some token, else 0
  int64_t* counts;
};
int64_t counts_length();

// Row: for each token, the weight rows of its own neurons. No backward pass.
int64_t row_workspace_bytes(int64_t m, int64_t k, int64_t n);
cudaError_t row_forward(const Layer& layer, void* workspace, const Result& result, cudaStream_t stream);

// Tile: for each tile of 128 tokens, products over the neurons that fire in it (README.md).
struct TileShape {
  int64_t m, k, n;
  bool gated;
  int64_t capacity;       // nonzeros that the lists hold; of a batch with more, slower kernels compute all
  int64_t long_capacity;  // of those, how many may be in rows of more than 512 nonzeros
  bool ordered;           // whether tokens that fire the same neurons share a tile, or 128 tokens in a row do
};
// A shape with lists for `capacity` nonzeros, 1 to tile_max_capacity(), or a few more. long_capacity: -1 for all of
// them.
TileShape tile_shape(int64_t m, int64_t k, int64_t n, bool gated, int64_t capacity, int64_t long_capacity,
                     bool ordered);
int64_t tile_max_tokens(bool saving);
int64_t tile_max_capacity();
int64_t tile_workspace_bytes(const TileShape& shape, bool saving);
// The length of a saved buffer says which engine filled it and how: a multiple of 16 bytes, and beyond it the engine's
// number, for the tile engine 2, and 4 if its tokens are ordered. So the shape is found again from the length alone;
// its capacity is -1 if no shape has that length.
int64_t tile_saved_bytes(const TileShape& shape);
TileShape tile_shape_of_saved(int64_t length, int64_t m, int64_t k, int64_t n, bool gated);
// saved: null, or what tile_backward needs is written there.
cudaError_t tile_forward(const Layer& layer, const TileShape& shape, void* workspace, void* saved, const Result& result,
                         cudaStream_t stream);

// The gradients of a layer from dy, bf16 [M, K], and dl1, float32 [1].
struct Gradients {
  void* dx;                           // bf16 [M, K]
  void *dw_gate, *dw_up, *dw_down_t;  // [N, K]; dw_gate: null if the layer is not gated
  bool float_weights;                 // the gradients of the weights are float32 rather than bf16
};
int64_t tile_backward_workspace_bytes(const TileShape& shape);
cudaError_t tile_backward(const Layer& layer, const TileShape& shape, const void* dy, const float* dl1, void* saved,
                          void* workspace, const Gradients& gradients, cudaStream_t stream);

// A field of the tile engine's plan within a saved buffer, by name, for the tests of single stages: element_bytes is 0
// if there is none of that name.
struct Field {
  int64_t offset, count;
  int element_bytes;
};
Field tile_saved_field(const TileShape& shape, const char* name);

// Dense: the parts of the engine that are not plain matrix products, which cuBLAS computes.
//
// For many tokens: forward one kernel makes h [M, N], and g and u, bf16 [M, N], where these are not null; backward one
// makes dz, du and h of dh = dy w_down, which is never in memory. w_down: bf16 [K, N]. Not gated: u and du are null.
int64_t dense_workspace_bytes(int64_t m, int64_t n);
cudaError_t dense_forward(const Layer& layer, void* workspace, void* g, void* u, void* h, const Result& result,
                          cudaStream_t stream);
cudaError_t dense_backward(const void* dy, const void* w_down, int64_t m, int64_t k, int64_t n, const void* g,
                           const void* u, const float* dl1, void* workspace, void* dz, void* du, void* h,
                           cudaStream_t stream);
// For few tokens, the elementwise kernels between cuBLAS's products z, u and dh: forward h = relu(z) * u, backward h,
// du and dz, all bf16 [M, N]. Not gated: u and du are null. h may be z, dz may be dh.
cudaError_t pointwise_forward(const void* z, const void* u, int64_t m, int64_t n, void* workspace, void* h,
                              const Result& result, cudaStream_t stream);
cudaError_t pointwise_backward(const void* z, const void* u, const void* dh, const float* dl1, int64_t m, int64_t n,
                               void* dz, void* du, void* h, cudaStream_t stream);

// The packed form of relu(x w^T) (README.md), which the row and the tile engine start from.
struct PackedGate {
  uint32_t* words;      // [M, 4, ceil(N / 256), 8]
  void* wide;           // bf16 [M, N]
  uint32_t* mask;       // [ceil(M / 128), 8 ceil(N / 256)]
  int32_t* row_counts;  // [row_counts_length(M, N)], of which the first M are the tokens'
  uint8_t* fired;       // fired and counts: as of Result
  int64_t* counts;
};
int64_t row_counts_length(int64_t m, int64_t n);
cudaError_t pack(const void* x, const void* w, int64_t m, int64_t k, int64_t n, const PackedGate& out,
                 cudaStream_t stream);

// to [columns, rows] = the transpose of from [rows, columns], each float32 or bf16 (bf16 to float32: invalid); both
// multiples of 8.
cudaError_t transpose(const void* from, bool from_float, int64_t rows, int64_t columns, void* to, bool to_float,
                      cudaStream_t stream);

}  // namespace sparsellm
