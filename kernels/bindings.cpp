// The engines of engines.h as operators of torch, `torch.ops.sparsellm_cuda.*`, on torch's stable ABI: one build serves
// torch 2.10 and later. An operator allocates its results and workspace with torch's allocator, and launches on the
// current stream of its first tensor's device. sparsellm/ops checks shapes and dtypes, and never calls with no tokens;
// here it is only checked that every tensor is contiguous, 16-byte aligned and on that device.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
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

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

[[noreturn]] void refuse(const char* op, const std::string& why) {
  throw std::runtime_error(std::string("sparsellm_cuda::") + op + ": " + why);
}

// One call of an operator: its device, its stream, its name in errors, and how it allocates memory.
class Call {
 public:
  Call(const char* op, const Tensor& first) : op_(op), device_(first.get_device_index()), guard_(device_) {
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream(device_, &stream) != AOTI_TORCH_SUCCESS) {
      refuse(op_, "torch has no current CUDA stream");
    }
    stream_ = static_cast<cudaStream_t>(stream);
  }

  template <typename T = void>
  T* data(const Tensor& tensor) const {
    if (!tensor.is_cuda() || tensor.get_device_index() != device_) refuse(op_, "a tensor is on another device");
    if (!tensor.is_contiguous()) refuse(op_, "a tensor is not contiguous");
    if (reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 != 0) refuse(op_, "a tensor is not 16-byte aligned");
    return static_cast<T*>(tensor.data_ptr());
  }

  template <typename T = void>
  T* data(const OptionalTensor& tensor) const {
    return tensor ? data<T>(*tensor) : nullptr;
  }

  // A new contiguous tensor on this device, with undefined contents.
  Tensor empty(const std::vector<int64_t>& sizes, int32_t dtype) const {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
    AtenTensorHandle made = nullptr;
    if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype,
                                 aoti_torch_device_type_cuda(), device_, &made) != AOTI_TORCH_SUCCESS) {
      refuse(op_, "torch could not allocate a tensor");
    }
    return Tensor(made);
  }
  Tensor bytes(int64_t count) const { return empty({count}, aoti_torch_dtype_uint8()); }
  Tensor bf16(const std::vector<int64_t>& sizes) const { return empty(sizes, aoti_torch_dtype_bfloat16()); }

  cudaStream_t stream() const { return stream_; }

  void check(cudaError_t error) const {
    if (error != cudaSuccess) refuse(op_, cudaGetErrorString(error));
  }

 private:
  const char* op_;
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;  // makes device_ the current device, for launches and tensor maps
  cudaStream_t stream_ = nullptr;
};

// Elements [first, first + count) of `whole`, as a tensor of one dimension that shares the memory of `whole`.
Tensor part_of(const Tensor& whole, int64_t first, int64_t count) {
  const int64_t sizes[] = {count}, strides[] = {1};
  AtenTensorHandle made = nullptr;
  if (aoti_torch__reinterpret_tensor(whole.get(), 1, sizes, strides, first, &made) != AOTI_TORCH_SUCCESS) {
    throw std::runtime_error("sparsellm_cuda: torch could not make a view of a tensor");
  }
  return Tensor(made);
}

sparsellm::Layer layer_of(const Call& call, const Tensor& x, const OptionalTensor& w_gate, const Tensor& w_up,
                          const OptionalTensor& w_down_t) {
  return {call.data(x), call.data(w_gate), call.data(w_up), call.data(w_down_t), x.size(0), x.size(1), w_up.size(0)};
}

// The statistics that an operator returns: l1 float32 [], fired bool [N], counts int64 [4] (engines.h).
struct Statistics {
  Statistics(const Call& call, int64_t n)
      : l1(call.empty({}, aoti_torch_dtype_float32())),
        fired(call.empty({n}, aoti_torch_dtype_bool())),
        all_counts(call.empty({sparsellm::counts_length()}, aoti_torch_dtype_int64())) {}

  sparsellm::Result result(void* y) const {
    return {y, static_cast<float*>(l1.data_ptr()), static_cast<uint8_t*>(fired.data_ptr()),
            static_cast<int64_t*>(all_counts.data_ptr())};
  }
  Tensor counts() const { return part_of(all_counts, 0, 4); }

  const Tensor l1, fired, all_counts;
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gate_pack(Tensor x, Tensor w) {
  const Call call("gate_pack", x);
  const int64_t m = x.size(0), n = w.size(0), column_tiles = (n + sparsellm::kColumnTile - 1) / sparsellm::kColumnTile;
  const int32_t int32 = aoti_torch_dtype_int32();
  const Statistics counted(call, n);
  const Tensor words = call.empty(
                   {m, sparsellm::kTileWords / sparsellm::kSectorWords, column_tiles, sparsellm::kSectorWords}, int32),
               wide = call.bf16({m, n});
  const Tensor mask = call.empty(
      {(m + sparsellm::kTokenTile - 1) / sparsellm::kTokenTile, column_tiles * sparsellm::kColumnTile / 32}, int32);
  const Tensor row_counts = call.empty({sparsellm::row_counts_length(m, n)}, int32);
  call.check(sparsellm::pack(
      call.data(x), call.data(w), m, x.size(1), n,
      {call.data<uint32_t>(words), call.data(wide), call.data<uint32_t>(mask), call.data<int32_t>(row_counts),
       call.data<uint8_t>(counted.fired), call.data<int64_t>(counted.all_counts)},
      call.stream()));
  return {words, wide, mask, part_of(row_counts, 0, m), counted.fired, counted.counts()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> row_forward(Tensor x, OptionalTensor w_gate, Tensor w_up, Tensor w_down_t) {
  const Call call("row_forward", x);
  const sparsellm::Layer layer = layer_of(call, x, w_gate, w_up, w_down_t);
  const Tensor y = call.bf16({layer.m, layer.k});
  const Statistics counted(call, layer.n);
  const Tensor workspace = call.bytes(sparsellm::row_workspace_bytes(layer.m, layer.k, layer.n));
  call.check(sparsellm::row_forward(layer, workspace.data_ptr(), counted.result(y.data_ptr()), call.stream()));
  return {y, counted.l1, counted.fired, counted.counts()};
}

Results tile_forward(Tensor x, OptionalTensor w_gate, Tensor w_up, Tensor w_down_t, int64_t capacity,
                     std::optional<int64_t> long_capacity, bool ordered, bool saving) {
  const Call call("tile_forward", x);
  const sparsellm::Layer layer = layer_of(call, x, w_gate, w_up, w_down_t);
  if (capacity < 1 || capacity > sparsellm::tile_max_capacity()) {
    refuse("tile_forward", "capacity is " + std::to_string(capacity) + ": it should be between 1 and " +
                               std::to_string(sparsellm::tile_max_capacity()));
  }
  const auto shape =
      sparsellm::tile_shape(layer.m, layer.k, layer.n, layer.gated(), capacity, long_capacity.value_or(-1), ordered);
  const Tensor y = call.bf16({layer.m, layer.k});
  const Statistics counted(call, layer.n);
  const Tensor saved = call.bytes(saving ? sparsellm::tile_saved_bytes(shape) : 0);
  const Tensor workspace = call.bytes(sparsellm::tile_workspace_bytes(shape, saving));
  call.check(sparsellm::tile_forward(layer, shape, workspace.data_ptr(), saving ? saved.data_ptr() : nullptr,
                                     counted.result(y.data_ptr()), call.stream()));
  return {y, counted.l1, counted.fired, counted.counts(), saved};
}

sparsellm::TileShape shape_of_saved(const char* op, const Tensor& saved, int64_t m, int64_t k, int64_t n, bool gated) {
  const auto shape = sparsellm::tile_shape_of_saved(saved.numel(), m, k, n, gated);
  if (shape.capacity > 0) return shape;
  refuse(op, "saved has " + std::to_string(saved.numel()) + " bytes: tile_forward saves so many for no such layer");
}

std::vector<Tensor> tile_backward(Tensor x, OptionalTensor w_gate, Tensor w_up, Tensor w_down_t, Tensor dy, Tensor dl1,
                                  Tensor saved, bool float_weights) {
  const Call call("tile_backward", x);
  const sparsellm::Layer layer = layer_of(call, x, w_gate, w_up, w_down_t);
  const auto shape = shape_of_saved("tile_backward", saved, layer.m, layer.k, layer.n, layer.gated());
  const int32_t dtype = float_weights ? aoti_torch_dtype_float32() : aoti_torch_dtype_bfloat16();
  std::vector<Tensor> gradients = {call.bf16({layer.m, layer.k})};
  for (int weight = layer.gated() ? 0 : 1; weight < 2; ++weight) {
    gradients.push_back(call.empty({layer.n, layer.k}, dtype));
  }
  const Tensor by_neuron = call.empty({layer.n, layer.k}, dtype);
  const Tensor workspace = call.bytes(sparsellm::tile_backward_workspace_bytes(shape));
  call.check(sparsellm::tile_backward(layer, shape, call.data(dy), call.data<float>(dl1), saved.data_ptr(),
                                      workspace.data_ptr(),
                                      {gradients[0].data_ptr(), layer.gated() ? gradients[1].data_ptr() : nullptr,
                                       gradients.back().data_ptr(), by_neuron.data_ptr(), float_weights},
                                      call.stream()));
  gradients.push_back(call.empty({layer.k, layer.n}, dtype));
  call.check(sparsellm::transpose(by_neuron.data_ptr(), float_weights, layer.n, layer.k, gradients.back().data_ptr(),
                                  float_weights, call.stream()));
  return gradients;
}

int64_t tile_saved_bytes(int64_t m, int64_t n, bool gated, int64_t capacity, bool ordered) {
  return sparsellm::tile_saved_bytes(sparsellm::tile_shape(m, 8, n, gated, capacity, -1, ordered));
}

Tensor tile_saved_field(Tensor saved, int64_t m, int64_t n, bool gated, std::string name) {
  const auto field =
      sparsellm::tile_saved_field(shape_of_saved("tile_saved_field", saved, m, 8, n, gated), name.c_str());
  if (field.element_bytes == 0) refuse("tile_saved_field", "there is no field " + name);
  return part_of(saved, field.offset, field.count * field.element_bytes);
}

int64_t limit(std::string name) {
  if (name == "tile tokens") return sparsellm::tile_max_tokens(false);
  if (name == "tile tokens with gradients") return sparsellm::tile_max_tokens(true);
  if (name == "tile capacity") return sparsellm::tile_max_capacity();
  refuse("limit", "there is no limit of the name " + name);
}

Results dense_forward(Tensor x, OptionalTensor w_gate, Tensor w_up, bool saving) {
  const Call call("dense_forward", x);
  const sparsellm::Layer layer = layer_of(call, x, w_gate, w_up, std::nullopt);
  const int64_t plane = layer.m * layer.n * 2, planes = layer.gated() ? 2 : 1;
  const Tensor h = call.bf16({layer.m, layer.n}), saved = call.bytes(saving ? planes * plane : 0);
  const Statistics counted(call, layer.n);
  const Tensor workspace = call.bytes(sparsellm::dense_workspace_bytes(layer.m, layer.n));
  char* g = saving ? static_cast<char*>(saved.data_ptr()) : nullptr;
  call.check(sparsellm::dense_forward(layer, workspace.data_ptr(), g, saving && layer.gated() ? g + plane : nullptr,
                                      h.data_ptr(), counted.result(nullptr), call.stream()));
  return {h, counted.l1, counted.fired, counted.counts(), saved};
}

std::vector<Tensor> dense_backward(Tensor dy, Tensor w_down, Tensor g, OptionalTensor u, Tensor dl1) {
  const Call call("dense_backward", dy);
  const int64_t m = g.size(0), n = g.size(1);
  const Tensor dz = call.bf16({m, n}), h = call.bf16({m, n}), du = call.bf16({u ? m : 0, n});
  const Tensor workspace = call.bytes(sparsellm::dense_workspace_bytes(m, n));
  call.check(sparsellm::dense_backward(call.data(dy), call.data(w_down), m, dy.size(1), n, call.data(g), call.data(u),
                                       call.data<float>(dl1), workspace.data_ptr(), dz.data_ptr(),
                                       u ? du.data_ptr() : nullptr, h.data_ptr(), call.stream()));
  return u ? std::vector<Tensor>{h, dz, du} : std::vector<Tensor>{h, dz};
}

std::tuple<Tensor, Tensor, Tensor> pointwise_forward(Tensor z, OptionalTensor u, Tensor h) {
  const Call call("pointwise_forward", z);
  const int64_t m = z.size(0), n = z.size(1);
  const Statistics counted(call, n);
  const Tensor workspace = call.bytes(sparsellm::dense_workspace_bytes(m, n));
  call.check(sparsellm::pointwise_forward(call.data(z), call.data(u), m, n, workspace.data_ptr(), call.data(h),
                                          counted.result(nullptr), call.stream()));
  return {counted.l1, counted.fired, counted.counts()};
}

std::vector<Tensor> pointwise_backward(Tensor z, OptionalTensor u, Tensor dh, Tensor dl1) {
  const Call call("pointwise_backward", z);
  const int64_t m = z.size(0), n = z.size(1);
  const Tensor h = call.bf16({m, n}), du = call.bf16({u ? m : 0, n});
  call.check(sparsellm::pointwise_backward(call.data(z), call.data(u), call.data(dh), call.data<float>(dl1), m, n,
                                           call.data(dh), u ? du.data_ptr() : nullptr, h.data_ptr(), call.stream()));
  return u ? std::vector<Tensor>{h, du} : std::vector<Tensor>{h};
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
      "row_forward(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down_t) -> (Tensor y, Tensor l1, Tensor fired, "
      "Tensor counts)");
  library.def(
      "tile_forward(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down_t, int capacity, int? long_capacity, "
      "bool ordered, bool saving) -> (Tensor y, Tensor l1, Tensor fired, Tensor counts, Tensor saved)");
  library.def(
      "tile_backward(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down_t, Tensor dy, Tensor dl1, Tensor saved, "
      "bool float_weights) -> Tensor[]");
  library.def("tile_saved_bytes(int m, int n, bool gated, int capacity, bool ordered) -> int");
  library.def("tile_saved_field(Tensor saved, int m, int n, bool gated, str name) -> Tensor");
  library.def("limit(str name) -> int");
  library.def(
      "dense_forward(Tensor x, Tensor? w_gate, Tensor w_up, bool saving) -> (Tensor h, Tensor l1, Tensor fired, "
      "Tensor counts, Tensor saved)");
  library.def("dense_backward(Tensor dy, Tensor w_down, Tensor g, Tensor? u, Tensor dl1) -> Tensor[]");
  library.def("pointwise_forward(Tensor z, Tensor? u, Tensor(a!) h) -> (Tensor l1, Tensor fired, Tensor counts)");
  library.def("pointwise_backward(Tensor z, Tensor? u, Tensor(a!) dh, Tensor dl1) -> Tensor[]");
  library.def("transpose(Tensor from, Tensor(a!) to) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sparsellm_cuda, CUDA, library) {
  library.impl("gate_pack", TORCH_BOX(&gate_pack));
  library.impl("row_forward", TORCH_BOX(&row_forward));
  library.impl("tile_forward", TORCH_BOX(&tile_forward));
  library.impl("tile_backward", TORCH_BOX(&tile_backward));
  library.impl("tile_saved_field", TORCH_BOX(&tile_saved_field));
  library.impl("dense_forward", TORCH_BOX(&dense_forward));
  library.impl("dense_backward", TORCH_BOX(&dense_backward));
  library.impl("pointwise_forward", TORCH_BOX(&pointwise_forward));
  library.impl("pointwise_backward", TORCH_BOX(&pointwise_backward));
  library.impl("transpose", TORCH_BOX(&transpose));
}

// Operators on numbers alone: they take no tensors, and so have no device.
STABLE_TORCH_LIBRARY_IMPL(sparsellm_cuda, CompositeExplicitAutograd, library) {
  library.impl("tile_saved_bytes", TORCH_BOX(&tile_saved_bytes));
  library.impl("limit", TORCH_BOX(&limit));
}
