// Registers the engines declared in engines.h as torch operators, `torch.ops.sparsellm_cuda.*`, on torch's stable ABI,
// so that one build serves torch 2.10 and later. An operator allocates its results and workspace with torch's
// allocator, and launches on the current stream of its first tensor's device. sparsellm/ops checks shapes and dtypes,
// and never calls an operator without tokens; these bindings check only that every tensor is contiguous, 16-byte
// aligned and on that device.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cuda_runtime_api.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "engines.h"

namespace {

using sparsellm::kColumnTile, sparsellm::kSectorWords, sparsellm::kTileWords, sparsellm::kTokenTile;
using sparsellm::Layer, sparsellm::with_statistics_in;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

[[noreturn]] void refuse(const char* op, const std::string& why) {
  throw std::runtime_error(std::string("sparsellm_cuda::") + op + ": " + why);
}

template <typename Make>
Tensor made_by(const char* what, Make make) {
  AtenTensorHandle made = nullptr;
  if (make(&made) == AOTI_TORCH_SUCCESS) return Tensor(made);
  throw std::runtime_error(std::string("sparsellm_cuda: torch could not ") + what);
}

// One call of an operator: its device, its stream, its name for error messages, its memory allocation, and products.
class Call final : public sparsellm::Multiply {
 public:
  Call(const char* op, const Tensor& first) : op_(op), device_(first.get_device_index()), guard_(device_) {
    if (aoti_torch_get_current_cuda_stream(device_, &stream_) != AOTI_TORCH_SUCCESS) refuse(op_, "no CUDA stream");
  }

  template <typename T = void>
  T* data(const Tensor& tensor) const {
    if (!tensor.is_cuda() || tensor.get_device_index() != device_) refuse(op_, "a tensor is on another device");
    if (!tensor.is_contiguous()) refuse(op_, "a tensor is not contiguous");
    if (reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 != 0) refuse(op_, "a tensor is not 16-byte aligned");
    return static_cast<T*>(tensor.data_ptr());
  }

  // A new contiguous tensor on this device, with undefined contents.
  Tensor empty(const std::vector<int64_t>& sizes, int32_t dtype) const {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
    return made_by("allocate memory", [&](AtenTensorHandle* made) {
      return aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                                      aoti_torch_device_type_cuda(), device_, made);
    });
  }
  Tensor bytes(int64_t count) const { return empty({count}, aoti_torch_dtype_uint8()); }
  Tensor bf16(const std::vector<int64_t>& sizes) const { return empty(sizes, aoti_torch_dtype_bfloat16()); }

  // A tensor that refers to a matrix without owning its memory.
  Tensor view(const sparsellm::Matrix& a) const {
    const int64_t sizes[] = {a.rows, a.columns}, strides[] = {a.by_column ? 1 : a.columns, a.by_column ? a.rows : 1};
    return made_by("make a view", [&](AtenTensorHandle* made) {
      return aoti_torch_create_tensor_from_blob(const_cast<void*>(a.data), 2, sizes, strides, 0,
                                                aoti_torch_dtype_bfloat16(), aoti_torch_device_type_cuda(), device_,
                                                made);
    });
  }

  // Multiplies two matrices with cuBLAS, called in the same way as by torch.mm and torch.addmm.
  void operator()(const sparsellm::Matrix& a, const sparsellm::Matrix& b, void* out, bool add) const override {
    const Tensor left = view(a), right = view(b), to = view({out, a.rows, b.columns, false});
    const auto error = add ? aoti_torch_cuda_addmm_out(to.get(), to.get(), left.get(), right.get(), 1, 1)
                           : aoti_torch_cuda_mm_out(to.get(), left.get(), right.get());
    if (error != AOTI_TORCH_SUCCESS) refuse(op_, "torch could not multiply two matrices");
  }

  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_); }

  void check(cudaError_t error) const {
    if (error != cudaSuccess) refuse(op_, cudaGetErrorString(error));
  }

 private:
  const char* op_;
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;  // makes device_ the current device, for launches and tensor maps
  void* stream_ = nullptr;
};

// Elements [first, first + count) of `whole`, as a one-dimensional tensor that shares the memory of `whole`.
Tensor part_of(const Tensor& whole, int64_t first, int64_t count) {
  const int64_t stride = 1;
  return made_by("make a view", [&](AtenTensorHandle* made) {
    return aoti_torch__reinterpret_tensor(whole.get(), 1, &count, &stride, first, made);
  });
}

Layer layer_of(const Call& call, const Tensor& x, const OptionalTensor& w_gate, const Tensor& w_up,
               const OptionalTensor& w_down_t) {
  const auto data = [&](const OptionalTensor& w) { return w ? call.data(*w) : nullptr; };
  const int64_t k = w_up.size(1);
  return {data(x), data(w_gate), data(w_up), data(w_down_t), x.numel() / k, k, w_up.size(0)};
}

// The statistics that an operator returns: l1 float32 [], fired bool [N], counts int64 [5]. If not
// wanted, all three have shape [0].
struct Statistics {
  Statistics(const Call& call, int64_t n, bool wanted = true)
      : l1(call.empty(std::vector<int64_t>(wanted ? 0 : 1), aoti_torch_dtype_float32())),
        fired(call.empty({wanted ? n : 0}, aoti_torch_dtype_bool())),
        all_counts(call.empty({wanted ? sparsellm::counts_length() : 0}, aoti_torch_dtype_int64())) {}
  sparsellm::Result result(void* y) const {
    return {y, static_cast<float*>(l1.data_ptr()), static_cast<uint8_t*>(fired.data_ptr()),
            static_cast<int64_t*>(all_counts.data_ptr())};
  }
  Tensor counts() const { return part_of(all_counts, 0, all_counts.numel() == 0 ? 0 : sparsellm::kCounts); }
  const Tensor l1, fired, all_counts;
};

using Packed = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Allocates the packed gate of m tokens and n neurons, which `pack` fills, and returns its tensors.
template <typename Pack>
Packed packed_by(const Call& call, int64_t m, int64_t n, Pack pack) {
  const int64_t column_tiles = (n + kColumnTile - 1) / kColumnTile;
  const auto int32 = [&](const std::vector<int64_t>& sizes) { return call.empty(sizes, aoti_torch_dtype_int32()); };
  const Tensor words = int32({m, kTileWords / kSectorWords, column_tiles, kSectorWords}), wide = call.bf16({m * n});
  const Tensor mask = int32({(m + kTokenTile - 1) / kTokenTile, column_tiles * kColumnTile / 32});
  const Tensor row_counts = int32({sparsellm::row_counts_length(m, n)});
  const Statistics counted(call, n);
  call.check(pack({call.data<uint32_t>(words), call.data(wide), call.data<uint32_t>(mask),
                   call.data<int32_t>(row_counts), call.data<uint8_t>(counted.fired),
                   call.data<int64_t>(counted.all_counts)}));
  return {words, wide, mask, part_of(row_counts, 0, m), counted.fired, counted.counts()};
}

Packed gate_pack(Tensor x, Tensor w) {
  const Call call("gate_pack", x);
  const int64_t m = x.size(0), n = w.size(0);
  return packed_by(call, m, n, [&](const sparsellm::PackedGate& out) {
    return sparsellm::pack(call.data(x), call.data(w), m, x.size(1), n, out, call.stream());
  });
}

sparsellm::Float8Gate float8_of(const Call& call, const Tensor& x, const Tensor& x_scales, const Tensor& w,
                                const Tensor& w_scales) {
  return {call.data(x), call.data<float>(x_scales), call.data(w), call.data<float>(w_scales)};
}

Packed gate_pack_float8(Tensor x, Tensor x_scales, Tensor w, Tensor w_scales) {
  const Call call("gate_pack_float8", x);
  const int64_t m = x.size(0), n = w.size(0);
  return packed_by(call, m, n, [&](const sparsellm::PackedGate& out) {
    return sparsellm::pack_float8(float8_of(call, x, x_scales, w, w_scales), m, x.size(1), n, out, call.stream());
  });
}

std::tuple<Tensor, Tensor> quantize_rows(Tensor from) {
  const Call call("quantize_rows", from);
  const int64_t rows = from.size(0), columns = from.size(1);
  const Tensor values = call.empty({rows, columns}, aoti_torch_dtype_float8_e4m3fn());
  const Tensor scales = call.empty({rows}, aoti_torch_dtype_float32());
  call.check(sparsellm::quantize_rows(call.data(from), rows, columns, values.data_ptr(),
                                      static_cast<float*>(scales.data_ptr()), call.stream()));
  return {values, scales};
}

// Returns y and, if `counting`, the statistics. If not `counting`, the statistics go to the workspace, because the host
// needs about 5 us for each result that it returns.
std::vector<Tensor> row_results(const Call& call, const Layer& a, const Tensor& x, bool counting) {
  const Tensor y = call.bf16({x.sizes().begin(), x.sizes().end()});
  const int64_t own = sparsellm::row_workspace_bytes(a.m, a.k, a.n);
  const Tensor workspace = call.bytes(own + (counting ? 0 : sparsellm::statistics_bytes(a.n)));
  const auto counted = counting ? std::optional<Statistics>(std::in_place, call, a.n) : std::nullopt;
  void* behind = static_cast<char*>(workspace.data_ptr()) + own;
  const auto result = counting ? counted->result(y.data_ptr()) : with_statistics_in(behind, a.n, y.data_ptr());
  call.check(sparsellm::row_forward(a, call, workspace.data_ptr(), result, call.stream()));
  return counting ? std::vector{y, counted->l1, counted->fired, counted->counts()} : std::vector{y};
}

std::vector<Tensor> row_forward(Tensor x, OptionalTensor w_gate, Tensor w_up, Tensor w_down_t, bool counting) {
  const Call call("row_forward", x);
  return row_results(call, layer_of(call, x, w_gate, w_up, w_down_t), x, counting);
}

// The weights are e4m3. gate_scales: of w_gate, or of w_up of a non-gated layer; up_scales: of w_up of a gated layer.
std::vector<Tensor> row_forward_float8(Tensor x, OptionalTensor w_gate, Tensor w_up, Tensor w_down_t,
                                       Tensor gate_scales, OptionalTensor up_scales, bool counting) {
  const Call call("row_forward_float8", x);
  const sparsellm::Float8Scales scales = {call.data<float>(gate_scales),
                                          up_scales ? call.data<float>(*up_scales) : nullptr};
  Layer a = layer_of(call, x, w_gate, w_up, w_down_t);
  a.scales = &scales;
  return row_results(call, a, x, counting);
}

Results tile_results(const Call& call, const Layer& a, int64_t capacity, std::optional<int64_t> long_capacity,
                     bool ordered, bool saving) {
  if (capacity < 1 || capacity > sparsellm::tile_max_capacity()) {
    refuse("tile_forward", "capacity is " + std::to_string(capacity) + ": it should be 1 to limit('tile capacity')");
  }
  const auto shape = sparsellm::tile_shape(a.m, a.k, a.n, a.gated(), capacity, long_capacity.value_or(-1), ordered);
  const Tensor y = call.bf16({a.m, a.k});
  const Statistics counted(call, a.n);
  const Tensor saved = call.bytes(saving ? sparsellm::tile_saved_bytes(shape) : 0);
  const Tensor workspace = call.bytes(sparsellm::tile_workspace_bytes(shape, saving));
  call.check(sparsellm::tile_forward(a, shape, workspace.data_ptr(), saving ? saved.data_ptr() : nullptr,
                                     counted.result(y.data_ptr()), call.stream()));
  return {y, counted.l1, counted.fired, counted.counts(), saved};
}

Results tile_forward(Tensor x, OptionalTensor w_gate, Tensor w_up, Tensor w_down_t, int64_t capacity,
                     std::optional<int64_t> long_capacity, bool ordered, bool saving) {
  const Call call("tile_forward", x);
  return tile_results(call, layer_of(call, x, w_gate, w_up, w_down_t), capacity, long_capacity, ordered, saving);
}

// w_thresholded: w_gate, or w_up of a non-gated layer, in FP8; like x_values, it has scales per row.
Results tile_forward_float8(Tensor x, OptionalTensor w_gate, Tensor w_up, Tensor w_down_t, Tensor x_values,
                            Tensor x_scales, Tensor w_thresholded, Tensor w_scales, int64_t capacity, bool ordered,
                            bool saving) {
  const Call call("tile_forward_float8", x);
  const sparsellm::Float8Gate float8 = float8_of(call, x_values, x_scales, w_thresholded, w_scales);
  Layer a = layer_of(call, x, w_gate, w_up, w_down_t);
  a.float8 = &float8;
  return tile_results(call, a, capacity, std::nullopt, ordered, saving);
}

sparsellm::TileShape shape_of_saved(const char* op, const Tensor& saved, int64_t m, int64_t k, int64_t n, bool gated) {
  const auto shape = sparsellm::tile_shape_of_saved(saved.numel(), m, k, n, gated);
  if (shape.capacity > 0) return shape;
  refuse(op, "saved has " + std::to_string(saved.numel()) + " bytes: it should have the length of a buffer that" +
                 " tile_forward saves for " + std::to_string(m) + " tokens and " + std::to_string(n) + " neurons");
}

// dw_*: where the gradients of the weights are written, or with `add`, which needs float32, added. Returns dx.
Tensor tile_backward(Tensor x, OptionalTensor w_gate, Tensor w_up, Tensor w_down_t, Tensor dy, Tensor dl1, Tensor saved,
                     OptionalTensor dw_gate, Tensor dw_up, Tensor dw_down, bool add) {
  const Call call("tile_backward", x);
  const Layer a = layer_of(call, x, w_gate, w_up, w_down_t);
  const auto shape = shape_of_saved("tile_backward", saved, a.m, a.k, a.n, a.gated());
  const bool float_weights = dw_up.element_size() == 4;
  if (add && !float_weights) refuse("tile_backward", "dw_up is not float32, so nothing can be added to it");
  const Tensor dx = call.bf16({a.m, a.k});
  const Tensor workspace = call.bytes(sparsellm::tile_backward_workspace_bytes(shape, float_weights));
  const sparsellm::Gradients gradients = {
      dx.data_ptr(), dw_gate ? call.data(*dw_gate) : nullptr, call.data(dw_up), call.data(dw_down), float_weights, add};
  call.check(sparsellm::tile_backward(a, shape, call.data(dy), call.data<float>(dl1), call.data(saved),
                                      workspace.data_ptr(), gradients, call.stream()));
  return dx;
}

int64_t tile_saved_bytes(int64_t m, int64_t n, bool gated, int64_t capacity, bool ordered) {
  return sparsellm::tile_saved_bytes(sparsellm::tile_shape(m, 8, n, gated, capacity, -1, ordered));
}

Tensor tile_saved_field(Tensor saved, int64_t m, int64_t n, bool gated, std::string name) {
  const auto field =
      sparsellm::tile_saved_field(shape_of_saved("tile_saved_field", saved, m, 8, n, gated), name.c_str());
  if (field.element_bytes == 0) refuse("tile_saved_field", "there is no field named " + name);
  return part_of(saved, field.offset, field.count * field.element_bytes);
}

int64_t limit(std::string name) {
  if (name == "tile tokens") return sparsellm::tile_max_tokens(false);
  if (name == "tile tokens with gradients") return sparsellm::tile_max_tokens(true);
  if (name == "tile capacity") return sparsellm::tile_max_capacity();
  if (name == "few tokens") return sparsellm::kFewTokens;
  if (name == "many tokens") return sparsellm::kManyTokens;
  if (name == "runtime version") return CUDART_VERSION;
  if (name == "driver version") {  // the newest CUDA that the driver supports; 0 without a driver
    int version = 0;
    cudaDriverGetVersion(&version);
    return version;
  }
  refuse("limit", "there is no limit named " + name);
}

Results dense_forward(Tensor x, OptionalTensor w_gate, Tensor w_up, Tensor w_down, bool fused, bool counting,
                      bool saving) {
  const Call call("dense_forward", x);
  const Layer a = layer_of(call, x, w_gate, w_up, std::nullopt);
  const Tensor y = call.bf16({a.m, a.k});
  const Statistics counted(call, a.n, counting || fused);
  const Tensor saved = call.bytes(saving ? sparsellm::dense_saved_bytes(a) : 0);
  const Tensor workspace = call.bytes(sparsellm::dense_workspace_bytes(a, fused, saving));
  call.check(sparsellm::dense_forward(a, call.data(w_down), fused, call, workspace.data_ptr(),
                                      saving ? saved.data_ptr() : nullptr, counted.result(y.data_ptr()),
                                      call.stream()));
  return {y, counted.l1, counted.fired, counted.counts(), saved};
}

std::vector<Tensor> dense_backward(Tensor x, OptionalTensor w_gate, Tensor w_up, Tensor w_down, Tensor dy, Tensor dl1,
                                   Tensor saved, bool fused) {
  const Call call("dense_backward", x);
  const Layer a = layer_of(call, x, w_gate, w_up, std::nullopt);
  if (const int64_t bytes = sparsellm::dense_saved_bytes(a); saved.numel() != bytes) {
    refuse("dense_backward", "saved has " + std::to_string(saved.numel()) + " bytes: it should have " +
                                 std::to_string(bytes) + ", which dense_forward saves for this layer");
  }
  // The gradients of x, w_gate (no rows in a non-gated layer), w_up and w_down.
  const std::vector<Tensor> made = {call.bf16({a.m, a.k}), call.bf16({a.gated() ? a.n : 0, a.k}),
                                    call.bf16({a.n, a.k}), call.bf16({a.k, a.n})};
  const auto at = [&](int i) { return made[i].data_ptr(); };
  const Tensor workspace = call.bytes(sparsellm::dense_backward_workspace_bytes(a));
  call.check(sparsellm::dense_backward(a, call.data(w_down), fused, call, call.data(dy), call.data<float>(dl1),
                                       call.data(saved), workspace.data_ptr(), {at(0), at(1), at(2), at(3)},
                                       call.stream()));
  return made;
}

void transpose(Tensor from, Tensor to) {
  const Call call("transpose", to);
  call.check(sparsellm::transpose(call.data(from), from.element_size() == 4, from.size(0), from.size(1), call.data(to),
                                  to.element_size() == 4, call.stream()));
}

}  // namespace

STABLE_TORCH_LIBRARY(sparsellm_cuda, library) {
  library.def(
      "gate_pack(Tensor x, Tensor w) -> (Tensor words, Tensor wide, Tensor mask, Tensor row_counts, Tensor fired, "
      "Tensor counts)");
  library.def(
      "gate_pack_float8(Tensor x, Tensor x_scales, Tensor w, Tensor w_scales) -> (Tensor words, Tensor wide, Tensor "
      "mask, Tensor row_counts, Tensor fired, Tensor counts)");
  library.def("quantize_rows(Tensor x) -> (Tensor values, Tensor scales)");
  library.def("row_forward(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down_t, bool counting) -> Tensor[]");
  library.def(
      "row_forward_float8(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down_t, Tensor gate_scales, Tensor? "
      "up_scales, bool counting) -> Tensor[]");
  library.def(
      "tile_forward(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down_t, int capacity, int? long_capacity, "
      "bool ordered, bool saving) -> (Tensor y, Tensor l1, Tensor fired, Tensor counts, Tensor saved)");
  library.def(
      "tile_forward_float8(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down_t, Tensor x_values, Tensor x_scales, "
      "Tensor w_thresholded, Tensor w_scales, int capacity, bool ordered, bool saving) -> (Tensor y, Tensor l1, Tensor "
      "fired, Tensor counts, Tensor saved)");
  library.def(
      "tile_backward(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down_t, Tensor dy, Tensor dl1, Tensor saved, "
      "Tensor(a!)? dw_gate, Tensor(b!) dw_up, Tensor(c!) dw_down, bool add) -> Tensor");
  library.def("tile_saved_bytes(int m, int n, bool gated, int capacity, bool ordered) -> int");
  library.def("tile_saved_field(Tensor saved, int m, int n, bool gated, str name) -> Tensor");
  library.def("limit(str name) -> int");
  library.def(
      "dense_forward(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down, bool fused, bool counting, bool saving) -> "
      "(Tensor y, Tensor l1, Tensor fired, Tensor counts, Tensor saved)");
  library.def(
      "dense_backward(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down, Tensor dy, Tensor dl1, Tensor saved, "
      "bool fused) -> Tensor[]");
  library.def("transpose(Tensor from, Tensor(a!) to) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sparsellm_cuda, CUDA, library) {
  library.impl("gate_pack", TORCH_BOX(&gate_pack));
  library.impl("gate_pack_float8", TORCH_BOX(&gate_pack_float8));
  library.impl("quantize_rows", TORCH_BOX(&quantize_rows));
  library.impl("row_forward", TORCH_BOX(&row_forward));
  library.impl("row_forward_float8", TORCH_BOX(&row_forward_float8));
  library.impl("tile_forward", TORCH_BOX(&tile_forward));
  library.impl("tile_forward_float8", TORCH_BOX(&tile_forward_float8));
  library.impl("tile_backward", TORCH_BOX(&tile_backward));
  library.impl("tile_saved_field", TORCH_BOX(&tile_saved_field));
  library.impl("dense_forward", TORCH_BOX(&dense_forward));
  library.impl("dense_backward", TORCH_BOX(&dense_backward));
  library.impl("transpose", TORCH_BOX(&transpose));
}

// These operators take no tensors whose device could select an implementation, so they are registered for any device.
STABLE_TORCH_LIBRARY_IMPL(sparsellm_cuda, CompositeExplicitAutograd, library) {
  library.impl("tile_saved_bytes", TORCH_BOX(&tile_saved_bytes));
  library.impl("limit", TORCH_BOX(&limit));
}
