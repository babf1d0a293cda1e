// The launchers of launch.h as operators of torch, `torch.ops.sparsellm_cuda.*`, on torch's stable ABI: one build
// serves torch 2.10 and later. Each operator writes into tensors that its caller has allocated (sparsellm/ops/cuda.py,
// which also checks shapes), on the current stream of the first tensor's device, and returns nothing. Sizes come from
// the tensors; every tensor must be contiguous and on one CUDA device.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cuda_runtime_api.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "launch.h"

namespace {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

[[noreturn]] void refuse(const char* op, const std::string& why) {
  throw std::runtime_error(std::string("sparsellm_cuda::") + op + ": " + why);
}

// One call of a launcher: its device, its stream, its name in errors.
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
    return static_cast<T*>(tensor.data_ptr());
  }

  template <typename T = void>
  T* data(const OptionalTensor& tensor) const {
    return tensor ? data<T>(*tensor) : nullptr;
  }

  cudaStream_t stream() const { return stream_; }

  void check(cudaError_t error) const {
    if (error != cudaSuccess) refuse(op_, cudaGetErrorString(error));
  }

 private:
  const char* op_;
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;  // the launchers and the tensor maps they make are per device
  cudaStream_t stream_ = nullptr;
};

sparsellm::Packed packed_of(const Call& call, const Tensor& words, const Tensor& wide, const Tensor& mask,
                            const Tensor& row_counts, const Tensor& fired, const Tensor& counters) {
  return {call.data<uint32_t>(words),     call.data(wide),           call.data<uint32_t>(mask),
          call.data<int32_t>(row_counts), call.data<uint8_t>(fired), call.data<int64_t>(counters)};
}

sparsellm::TilePlan plan_of(const Call& call, const Tensor& rows, const OptionalTensor& tokens, const Tensor& tile_mask,
                            const Tensor& prefix, const Tensor& slots, const Tensor& sizes, const Tensor& lists,
                            const Tensor& offsets, const Tensor& order, const Tensor& items, const Tensor& totals) {
  return {call.data<uint32_t>(rows),   call.data<int32_t>(tokens), call.data<uint32_t>(tile_mask),
          call.data<uint16_t>(prefix), call.data<uint16_t>(slots), call.data<int32_t>(sizes),
          call.data<uint32_t>(lists),  call.data<uint16_t>(offsets), call.data<int2>(order),
          call.data<int2>(items),      call.data<int32_t>(totals)};
}

void gate_pack(Tensor x, Tensor w, Tensor words, Tensor wide, Tensor mask, Tensor row_counts, Tensor fired,
               Tensor counters) {
  const Call call("gate_pack", x);
  call.check(sparsellm::gate_pack(call.data(x), call.data(w), x.size(0), x.size(1), w.size(0),
                                  static_cast<int>(words.size(2)),
                                  packed_of(call, words, wide, mask, row_counts, fired, counters),
                                  call.stream()));
}

void tile_plan(Tensor words, Tensor wide, Tensor mask, Tensor row_counts, Tensor fired, Tensor counters,
               Tensor rows, OptionalTensor tokens, Tensor tile_mask, Tensor prefix, Tensor slots, Tensor sizes,
               Tensor lists, Tensor offsets, Tensor order, Tensor items, Tensor totals) {
  const Call call("tile_plan", words);
  call.check(sparsellm::tile_plan(packed_of(call, words, wide, mask, row_counts, fired, counters), wide.size(0),
                                  wide.size(1), static_cast<int>(words.size(2)),
                                  plan_of(call, rows, tokens, tile_mask, prefix, slots, sizes, lists, offsets, order,
                                          items, totals),
                                  call.stream()));
}

void tile_up(OptionalTensor x, OptionalTensor w_up, Tensor words, Tensor wide, Tensor mask, Tensor row_counts,
             Tensor fired, Tensor counters, Tensor rows, OptionalTensor tokens, Tensor tile_mask, Tensor prefix,
             Tensor slots, Tensor sizes, Tensor lists, Tensor offsets, Tensor order, Tensor items, Tensor totals,
             Tensor h, Tensor l1_partials, Tensor l1) {
  const Call call("tile_up", words);
  call.check(sparsellm::tile_up(call.data(x), call.data(w_up), wide.size(0), x ? x->size(1) : 0, wide.size(1),
                                static_cast<int>(words.size(2)),
                                packed_of(call, words, wide, mask, row_counts, fired, counters),
                                plan_of(call, rows, tokens, tile_mask, prefix, slots, sizes, lists, offsets, order,
                                        items, totals),
                                call.data(h), call.data<float>(l1_partials), call.data<float>(l1), call.stream()));
}

void tile_down(Tensor h, Tensor w_down_t, Tensor rows, OptionalTensor tokens, Tensor tile_mask, Tensor prefix,
               Tensor slots, Tensor sizes, Tensor lists, Tensor offsets, Tensor order, Tensor items, Tensor totals,
               Tensor y) {
  const Call call("tile_down", h);
  call.check(sparsellm::tile_down(call.data(h), call.data(w_down_t), y.size(0), y.size(1), w_down_t.size(0),
                                  plan_of(call, rows, tokens, tile_mask, prefix, slots, sizes, lists, offsets, order,
                                          items, totals),
                                  call.data(y), call.stream()));
}

void pack_rows(Tensor words, Tensor wide, Tensor mask, Tensor row_counts, Tensor fired, Tensor counters, Tensor rows) {
  const Call call("pack_rows", words);
  call.check(sparsellm::pack_rows(packed_of(call, words, wide, mask, row_counts, fired, counters), wide.size(0),
                                  wide.size(1), static_cast<int>(words.size(2)), call.data<uint32_t>(rows),
                                  call.stream()));
}

void token_order(Tensor rows, Tensor row_counts, int64_t n, Tensor workspace, Tensor tokens) {
  const Call call("token_order", rows);
  call.check(sparsellm::token_order(call.data<uint32_t>(rows), call.data<int32_t>(row_counts), rows.size(0), n,
                                    call.data(workspace), call.data<int32_t>(tokens), call.stream()));
}

void row_ffn(OptionalTensor x, OptionalTensor w_up, Tensor w_down_t, Tensor words, Tensor wide, Tensor mask,
             Tensor row_counts, Tensor fired, Tensor counters, Tensor workspace, Tensor tickets, Tensor l1, Tensor y) {
  const Call call("row_ffn", words);
  call.check(sparsellm::row_ffn(call.data(x), call.data(w_up), call.data(w_down_t), y.size(0), y.size(1),
                                w_down_t.size(0), static_cast<int>(words.size(2)),
                                packed_of(call, words, wide, mask, row_counts, fired, counters),
                                call.data(workspace), call.data<int32_t>(tickets), call.data<float>(l1), call.data(y),
                                call.stream()));
}

void pointwise(Tensor z, OptionalTensor u, Tensor h, Tensor l1_partials, Tensor l1, Tensor fired, Tensor counters,
               Tensor tickets) {
  const Call call("pointwise", z);
  call.check(sparsellm::pointwise(call.data(z), call.data(u), z.size(0), z.size(1), call.data(h),
                                  call.data<float>(l1_partials), call.data<float>(l1), call.data<uint8_t>(fired),
                                  call.data<int64_t>(counters), call.data<int32_t>(tickets), call.stream()));
}

// The parts of the schemas that several operators share, in the order of the structs of launch.h.
#define SPARSELLM_PACKED "Tensor words, Tensor wide, Tensor mask, Tensor row_counts, Tensor fired, "
#define SPARSELLM_UNION "Tensor rows, Tensor? tokens, Tensor tile_mask, Tensor prefix, Tensor slots, Tensor sizes, "
#define SPARSELLM_LISTS "Tensor lists, Tensor offsets, Tensor order, Tensor items, "

}  // namespace

STABLE_TORCH_LIBRARY(sparsellm_cuda, library) {
  library.def(
      "gate_pack(Tensor x, Tensor w, Tensor(a!) words, Tensor(b!) wide, Tensor(c!) mask, Tensor(d!) row_counts, "
      "Tensor(e!) fired, Tensor(f!) counters) -> ()");
  library.def("pack_rows(" SPARSELLM_PACKED "Tensor counters, Tensor(a!) rows) -> ()");
  library.def("order_workspace(int m, int n) -> int");
  library.def("token_order(Tensor rows, Tensor row_counts, int n, Tensor(a!) workspace, Tensor(b!) tokens) -> ()");
  library.def(
      "tile_plan(" SPARSELLM_PACKED "Tensor(a!) counters, Tensor rows, Tensor? tokens, Tensor(b!) tile_mask, "
      "Tensor(c!) prefix, Tensor(d!) slots, Tensor(e!) sizes, Tensor(f!) lists, Tensor(g!) offsets, Tensor(h!) order, "
      "Tensor(i!) items, Tensor(j!) totals) -> ()");
  library.def(
      "tile_up(Tensor? x, Tensor? w_up, " SPARSELLM_PACKED "Tensor counters, " SPARSELLM_UNION SPARSELLM_LISTS
      "Tensor(a!) totals, Tensor(b!) h, Tensor(c!) l1_partials, Tensor(d!) l1) -> ()");
  library.def(
      "tile_down(Tensor h, Tensor w_down_t, " SPARSELLM_UNION SPARSELLM_LISTS "Tensor(a!) totals, Tensor(b!) y) -> ()");
  library.def("row_workspace(int m, int k, int n) -> int");
  library.def(
      "row_ffn(Tensor? x, Tensor? w_up, Tensor w_down_t, " SPARSELLM_PACKED
      "Tensor counters, Tensor(a!) workspace, Tensor(b!) tickets, Tensor(c!) l1, Tensor(d!) y) -> ()");
  library.def(
      "pointwise(Tensor z, Tensor? u, Tensor(a!) h, Tensor(b!) l1_partials, Tensor(c!) l1, Tensor(d!) fired, "
      "Tensor(e!) counters, Tensor(f!) tickets) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sparsellm_cuda, CUDA, library) {
  library.impl("gate_pack", TORCH_BOX(&gate_pack));
  library.impl("pack_rows", TORCH_BOX(&pack_rows));
  library.impl("token_order", TORCH_BOX(&token_order));
  library.impl("tile_plan", TORCH_BOX(&tile_plan));
  library.impl("tile_up", TORCH_BOX(&tile_up));
  library.impl("tile_down", TORCH_BOX(&tile_down));
  library.impl("row_ffn", TORCH_BOX(&row_ffn));
  library.impl("pointwise", TORCH_BOX(&pointwise));
}

// Sizes: numbers alone, so of no device.
STABLE_TORCH_LIBRARY_IMPL(sparsellm_cuda, CompositeExplicitAutograd, library) {
  library.impl("order_workspace", TORCH_BOX(&sparsellm::order_workspace));
  library.impl("row_workspace", TORCH_BOX(&sparsellm::row_workspace));
}
