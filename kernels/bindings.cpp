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

// W, of words [M, W / 8, NT, 8].
int words_per_tile(const Tensor& words) { return static_cast<int>(words.size(1)) * sparsellm::kSectorWords; }

sparsellm::Packed packed_of(const Call& call, const Tensor& words, const Tensor& wide, const Tensor& mask,
                            const Tensor& row_counts, const Tensor& fired, const Tensor& counters) {
  return {call.data<uint32_t>(words),     call.data(wide),           call.data<uint32_t>(mask),
          call.data<int32_t>(row_counts), call.data<uint8_t>(fired), call.data<int64_t>(counters)};
}

// rows is flat: of m tokens a row each, and behind them what there is room for of long rows.
sparsellm::TilePlan plan_of(const Call& call, int64_t m, const Tensor& rows, const OptionalTensor& tokens,
                            const Tensor& slots, const Tensor& starts, const Tensor& lists, const Tensor& tiles,
                            const Tensor& order, const Tensor& items, const Tensor& totals) {
  return {call.data<uint32_t>(rows),   rows.numel() - m * sparsellm::kRowCapacity,
          call.data<int32_t>(tokens),  call.data<uint16_t>(slots),
          call.data<uint32_t>(starts), call.data<uint32_t>(lists),
          lists.numel() / 4 * 4,       call.data<int4>(tiles),  // lists are read in fours
          call.data<int4>(order),      call.data<int4>(items),
          call.data<int32_t>(totals)};
}

void gate_pack(Tensor x, Tensor w, Tensor words, Tensor wide, Tensor mask, Tensor row_counts, Tensor fired,
               Tensor counters, bool for_row) {
  const Call call("gate_pack", x);
  call.check(sparsellm::gate_pack(call.data(x), call.data(w), x.size(0), x.size(1), w.size(0),
                                  words_per_tile(words),
                                  packed_of(call, words, wide, mask, row_counts, fired, counters),
                                  counters.numel(), for_row, call.stream()));
}

#define SPARSELLM_PACKED_TENSORS \
  Tensor words, Tensor wide, Tensor mask, Tensor row_counts, Tensor fired, Tensor counters
#define SPARSELLM_PLAN_TENSORS \
  Tensor rows, OptionalTensor tokens, Tensor slots, Tensor starts, Tensor lists, Tensor tiles, Tensor order, \
      Tensor items, Tensor totals

void pack_rows(SPARSELLM_PACKED_TENSORS, SPARSELLM_PLAN_TENSORS) {
  const Call call("pack_rows", words);
  call.check(sparsellm::pack_rows(
      packed_of(call, words, wide, mask, row_counts, fired, counters), wide.size(0), wide.size(1),
      words_per_tile(words),
      plan_of(call, wide.size(0), rows, tokens, slots, starts, lists, tiles, order, items, totals), call.stream()));
}

void tile_plan(SPARSELLM_PACKED_TENSORS, SPARSELLM_PLAN_TENSORS) {
  const Call call("tile_plan", words);
  call.check(sparsellm::tile_plan(
      packed_of(call, words, wide, mask, row_counts, fired, counters), wide.size(0), wide.size(1),
      plan_of(call, wide.size(0), rows, tokens, slots, starts, lists, tiles, order, items, totals), call.stream()));
}

void tile_up(OptionalTensor x, OptionalTensor w_up, int64_t m, int64_t n, SPARSELLM_PLAN_TENSORS, Tensor hidden,
             OptionalTensor ups, Tensor l1_partials, Tensor l1) {
  const Call call("tile_up", rows);
  call.check(sparsellm::tile_up(
      call.data(x), call.data(w_up), m, x ? x->size(1) : 0, n,
      plan_of(call, m, rows, tokens, slots, starts, lists, tiles, order, items, totals), call.data<uint32_t>(hidden),
      call.data(ups), call.data<float>(l1_partials), call.data<float>(l1), call.stream()));
}

// `neurons` and those after it: NeuronPlan.
#define SPARSELLM_NEURON_TENSORS \
  Tensor frequencies, Tensor ranks, Tensor neurons, Tensor masks, Tensor before, Tensor neuron_slots, Tensor counts, \
      Tensor bases, Tensor neuron_starts, Tensor neuron_tiles, Tensor neuron_order, Tensor at, Tensor places, \
      Tensor neuron_totals
#define SPARSELLM_NEURON_PLAN                                                                                       \
  sparsellm::NeuronPlan {                                                                                           \
    call.data<int32_t>(frequencies), call.data<int32_t>(ranks), call.data<int32_t>(neurons),                        \
        call.data<uint32_t>(masks), call.data<uint32_t>(before), call.data<int32_t>(neuron_slots),                  \
        call.data<uint32_t>(counts), call.data<uint32_t>(bases), call.data<uint32_t>(neuron_starts),                \
        call.data<int4>(neuron_tiles), call.data<int4>(neuron_order), call.data<uint32_t>(at),                      \
        call.data<uint16_t>(places), call.data<int32_t>(neuron_totals)                                              \
  }

void neuron_plan(int64_t m, int64_t k, int64_t n, SPARSELLM_PLAN_TENSORS, SPARSELLM_NEURON_TENSORS) {
  const Call call("neuron_plan", rows);
  const sparsellm::NeuronPlan out = SPARSELLM_NEURON_PLAN;
  call.check(sparsellm::neuron_plan(
      plan_of(call, m, rows, tokens, slots, starts, lists, tiles, order, items, totals), m, k, n, out, call.stream()));
}

void tile_gradient(Tensor dy, Tensor w_down_t, SPARSELLM_PLAN_TENSORS, OptionalTensor ups, Tensor dl1, Tensor dz,
                   OptionalTensor du, Tensor at, Tensor places, Tensor dz_by_neuron, OptionalTensor du_by_neuron,
                   Tensor h_by_neuron, Tensor tickets) {
  const Call call("tile_gradient", dy);
  const sparsellm::Gradient gradient = {call.data(ups),
                                        call.data<float>(dl1),
                                        call.data<uint32_t>(dz),
                                        call.data<uint32_t>(du),
                                        call.data<uint32_t>(at),
                                        call.data<uint16_t>(places),
                                        call.data<uint32_t>(dz_by_neuron),
                                        call.data<uint32_t>(du_by_neuron),
                                        call.data<uint32_t>(h_by_neuron),
                                        call.data<int32_t>(tickets)};
  call.check(sparsellm::tile_gradient(
      call.data(dy), call.data(w_down_t), dy.size(0), dy.size(1), w_down_t.size(0),
      plan_of(call, dy.size(0), rows, tokens, slots, starts, lists, tiles, order, items, totals), gradient,
      call.stream()));
}

void transpose(Tensor from, Tensor to) {
  const Call call("transpose", to);
  call.check(sparsellm::transpose(call.data(from), from.element_size() == 4, from.size(0), from.size(1), call.data(to),
                                  to.element_size() == 4, call.stream()));
}

// slots: [tiles, slots of each]; tokens: the row of y at each position.
void tile_spmm(Tensor lists, Tensor weights, OptionalTensor more_lists, OptionalTensor more_weights, Tensor slots,
               Tensor starts, Tensor order, OptionalTensor tokens, Tensor y) {
  const Call call("tile_spmm", y);
  call.check(sparsellm::tile_spmm({{call.data<uint32_t>(lists), call.data<uint32_t>(more_lists)},
                                   {call.data(weights), call.data(more_weights)},
                                   call.data<uint16_t>(slots),
                                   slots.size(1),
                                   call.data<uint32_t>(starts),
                                   starts.size(2),
                                   call.data<int4>(order),
                                   call.data<int32_t>(tokens),
                                   y.size(0),
                                   y.size(1),
                                   call.data(y)},
                                  call.stream()));
}

void tile_operands(Tensor lists, OptionalTensor more_lists, int64_t m, int64_t n, SPARSELLM_NEURON_TENSORS,
                   Tensor operand, OptionalTensor more_operand) {
  const Call call("tile_operands", lists);
  call.check(sparsellm::tile_operands({{call.data<uint32_t>(lists), call.data<uint32_t>(more_lists)},
                                       {call.data(operand), call.data(more_operand)},
                                       SPARSELLM_NEURON_PLAN,
                                       m,
                                       n},
                                      call.stream()));
}

void tile_weights(Tensor operand, OptionalTensor more_operand, Tensor source, SPARSELLM_NEURON_TENSORS,
                  Tensor partials, Tensor tickets, Tensor dw, OptionalTensor more_dw) {
  const Call call("tile_weights", source);
  call.check(sparsellm::tile_weights({{call.data(operand), call.data(more_operand)},
                                      call.data(source),
                                      SPARSELLM_NEURON_PLAN,
                                      source.size(0),
                                      source.size(1),
                                      dw.size(0),
                                      {call.data(dw), call.data(more_dw)},
                                      dw.element_size() == 4,
                                      call.data<float>(partials),
                                      call.data<int32_t>(tickets)},
                                     call.stream()));
}

void rest_backward(Tensor totals, Tensor x, Tensor dy, Tensor w_gate, OptionalTensor w_up, Tensor w_down_t, Tensor dl1,
                   Tensor dx, Tensor dw_gate, OptionalTensor dw_up, Tensor dw_down_t, Tensor planes, Tensor arrivals) {
  const Call call("rest_backward", x);
  sparsellm::RestBackward a = {};
  a.rest = call.data<int32_t>(totals) + sparsellm::kRest;
  a.x = call.data(x);
  a.dy = call.data(dy);
  a.w_gate = call.data(w_gate);
  a.w_up = call.data(w_up);
  a.w_down_t = call.data(w_down_t);
  a.dl1 = call.data<float>(dl1);
  a.dx = call.data(dx);
  a.dw_gate = call.data(dw_gate);
  a.dw_up = call.data(dw_up);
  a.dw_down_t = call.data(dw_down_t);
  a.float_gradients = dw_gate.element_size() == 4;
  a.planes = call.data(planes);
  a.arrivals = call.data<int32_t>(arrivals);
  a.m = static_cast<int>(x.size(0));
  a.k = static_cast<int>(x.size(1));
  a.n = static_cast<int>(w_down_t.size(0));
  call.check(sparsellm::rest_backward(a, call.stream()));
}

void token_order(Tensor rows, Tensor row_counts, int64_t n, Tensor workspace, Tensor tokens) {
  const Call call("token_order", rows);
  call.check(sparsellm::token_order(call.data<uint32_t>(rows), call.data<int32_t>(row_counts), row_counts.size(0), n,
                                    call.data(workspace), call.data<int32_t>(tokens), call.stream()));
}

void row_ffn(OptionalTensor x, OptionalTensor w_up, Tensor w_down_t, Tensor words, Tensor wide, Tensor mask,
             Tensor row_counts, Tensor fired, Tensor counters, Tensor workspace, Tensor tickets, Tensor l1, Tensor y) {
  const Call call("row_ffn", words);
  call.check(sparsellm::row_ffn(call.data(x), call.data(w_up), call.data(w_down_t), y.size(0), y.size(1),
                                w_down_t.size(0), words_per_tile(words),
                                packed_of(call, words, wide, mask, row_counts, fired, counters),
                                call.data(workspace), call.data<int32_t>(tickets), call.data<float>(l1), call.data(y),
                                call.stream()));
}

void row_rest(OptionalTensor x, OptionalTensor w_up, Tensor w_down_t, SPARSELLM_PACKED_TENSORS, Tensor totals,
              Tensor workspace, Tensor tickets, Tensor l1, Tensor y) {
  const Call call("row_rest", words);
  call.check(sparsellm::row_rest(call.data(x), call.data(w_up), call.data(w_down_t), y.size(0), y.size(1),
                                 w_down_t.size(0), words_per_tile(words),
                                 packed_of(call, words, wide, mask, row_counts, fired, counters),
                                 call.data<int32_t>(totals), call.data(workspace), call.data<int32_t>(tickets),
                                 call.data<float>(l1), call.data(y), call.stream()));
}

void dense_hidden(Tensor x, Tensor w_gate, OptionalTensor w_up, OptionalTensor g, OptionalTensor u, Tensor h,
                  Tensor l1_partials, Tensor l1, Tensor fired, Tensor counters) {
  const Call call("dense_hidden", x);
  call.check(sparsellm::dense_hidden(call.data(x), call.data(w_gate), call.data(w_up), x.size(0), x.size(1),
                                     w_gate.size(0), call.data(g), call.data(u), call.data(h),
                                     call.data<float>(l1_partials), call.data<float>(l1), call.data<uint8_t>(fired),
                                     call.data<int64_t>(counters), call.stream()));
}

void dense_gradient(Tensor dy, Tensor w_down, Tensor g, OptionalTensor u, Tensor dl1, Tensor dz, OptionalTensor du,
                    Tensor h, Tensor counters) {
  const Call call("dense_gradient", dy);
  call.check(sparsellm::dense_gradient(call.data(dy), call.data(w_down), dy.size(0), dy.size(1), w_down.size(1),
                                       call.data(g), call.data(u), call.data<float>(dl1), call.data(dz), call.data(du),
                                       call.data(h), call.data<int64_t>(counters), call.stream()));
}

void pointwise(Tensor z, OptionalTensor u, Tensor h, Tensor l1_partials, Tensor l1, Tensor fired, Tensor counters) {
  const Call call("pointwise", z);
  call.check(sparsellm::pointwise(call.data(z), call.data(u), z.size(0), z.size(1), call.data(h),
                                  call.data<float>(l1_partials), call.data<float>(l1), call.data<uint8_t>(fired),
                                  call.data<int64_t>(counters), call.stream()));
}

void pointwise_gradient(Tensor z, OptionalTensor u, Tensor dh, Tensor dl1, Tensor dz, OptionalTensor du, Tensor h) {
  const Call call("pointwise_gradient", z);
  call.check(sparsellm::pointwise_gradient(call.data(z), call.data(u), call.data(dh), call.data<float>(dl1), z.numel(),
                                           call.data(dz), call.data(du), call.data(h), call.stream()));
}

// The parts of the schemas that several operators share, in the order of the structs of launch.h.
#define SPARSELLM_PACKED "Tensor words, Tensor wide, Tensor mask, Tensor row_counts, Tensor fired, "
#define SPARSELLM_LISTS "Tensor rows, Tensor? tokens, Tensor slots, Tensor starts, Tensor lists, "
#define SPARSELLM_QUEUE "Tensor tiles, Tensor order, Tensor items, "
#define SPARSELLM_BY_NEURON "Tensor frequencies, Tensor ranks, Tensor neurons, Tensor masks, Tensor before, Tensor neuron_slots, Tensor counts, Tensor bases, Tensor neuron_starts, Tensor neuron_tiles, Tensor neuron_order, Tensor at, Tensor places, Tensor neuron_totals, "

}  // namespace

STABLE_TORCH_LIBRARY(sparsellm_cuda, library) {
  library.def(
      "gate_pack(Tensor x, Tensor w, Tensor(a!) words, Tensor(b!) wide, Tensor(c!) mask, Tensor(d!) row_counts, "
      "Tensor(e!) fired, Tensor(f!) counters, bool for_row) -> ()");
  library.def(
      "pack_rows(" SPARSELLM_PACKED
      "Tensor counters, Tensor(a!) rows, Tensor? tokens, Tensor slots, Tensor starts, Tensor lists, Tensor tiles, "
      "Tensor order, Tensor items, Tensor(b!) totals) -> ()");
  library.def("order_workspace(int m, int n) -> int");
  library.def("token_order(Tensor rows, Tensor row_counts, int n, Tensor(a!) workspace, Tensor(b!) tokens) -> ()");
  library.def(
      "tile_plan(" SPARSELLM_PACKED "Tensor(a!) counters, Tensor rows, Tensor? tokens, Tensor(b!) slots, "
      "Tensor(c!) starts, Tensor(d!) lists, Tensor(e!) tiles, Tensor(f!) order, Tensor(g!) items, Tensor(h!) totals) "
      "-> ()");
  library.def(
      "tile_up(Tensor? x, Tensor? w_up, int m, int n, " SPARSELLM_LISTS SPARSELLM_QUEUE
      "Tensor(a!) totals, Tensor(b!) hidden, Tensor(c!)? ups, Tensor(d!) l1_partials, Tensor(e!) l1) -> ()");
  library.def(
      "neuron_plan(int m, int k, int n, " SPARSELLM_LISTS SPARSELLM_QUEUE
      "Tensor totals, Tensor(a!) frequencies, Tensor(b!) ranks, Tensor(c!) neurons, Tensor(d!) masks, "
      "Tensor(e!) before, Tensor(f!) neuron_slots, Tensor(g!) counts, Tensor(h!) bases, Tensor(i!) neuron_starts, "
      "Tensor(j!) neuron_tiles, Tensor(k!) neuron_order, Tensor(l!) at, Tensor(m!) places, "
      "Tensor(n!) neuron_totals) -> ()");
  library.def(
      "tile_gradient(Tensor dy, Tensor w_down_t, " SPARSELLM_LISTS SPARSELLM_QUEUE
      "Tensor totals, Tensor? ups, Tensor dl1, Tensor(a!) dz, Tensor(b!)? du, Tensor at, Tensor places, "
      "Tensor(c!) dz_by_neuron, Tensor(d!)? du_by_neuron, Tensor(e!) h_by_neuron, Tensor(f!) tickets) -> ()");
  library.def(
      "tile_spmm(Tensor lists, Tensor weights, Tensor? more_lists, Tensor? more_weights, Tensor slots, Tensor starts, "
      "Tensor order, Tensor? tokens, Tensor(a!) y) -> ()");
  library.def(
      "tile_operands(Tensor lists, Tensor? more_lists, int m, int n, " SPARSELLM_BY_NEURON
      "Tensor(a!) operand, Tensor(b!)? more_operand) -> ()");
  library.def(
      "tile_weights(Tensor operand, Tensor? more_operand, Tensor source, " SPARSELLM_BY_NEURON
      "Tensor(a!) partials, Tensor(b!) tickets, Tensor(c!) dw, Tensor(d!)? more_dw) -> ()");
  library.def("transpose(Tensor from, Tensor(a!) to) -> ()");
  library.def("row_workspace(int m, int k, int n) -> int");
  library.def("row_rest_workspace(int m, int k) -> int");
  library.def(
      "row_ffn(Tensor? x, Tensor? w_up, Tensor w_down_t, " SPARSELLM_PACKED
      "Tensor(a!) counters, Tensor(b!) workspace, Tensor(c!) tickets, Tensor(d!) l1, Tensor(e!) y) -> ()");
  library.def(
      "row_rest(Tensor? x, Tensor? w_up, Tensor w_down_t, " SPARSELLM_PACKED
      "Tensor counters, Tensor totals, Tensor(a!) workspace, Tensor(b!) tickets, Tensor(c!) l1, Tensor(d!) y) -> ()");
  library.def(
      "dense_hidden(Tensor x, Tensor w_gate, Tensor? w_up, Tensor(a!)? g, Tensor(b!)? u, Tensor(c!) h, "
      "Tensor(d!) l1_partials, Tensor(e!) l1, Tensor(f!) fired, Tensor(g!) counters) -> ()");
  library.def(
      "dense_gradient(Tensor dy, Tensor w_down, Tensor g, Tensor? u, Tensor dl1, Tensor(a!) dz, Tensor(b!)? du, "
      "Tensor(c!) h, Tensor(d!) counters) -> ()");
  library.def(
      "pointwise(Tensor z, Tensor? u, Tensor(a!) h, Tensor(b!) l1_partials, Tensor(c!) l1, Tensor(d!) fired, "
      "Tensor(e!) counters) -> ()");
  library.def(
      "pointwise_gradient(Tensor z, Tensor? u, Tensor dh, Tensor dl1, Tensor(a!) dz, Tensor(b!)? du, Tensor(c!) h) "
      "-> ()");
  library.def("rest_backward_workspace(int m, int n) -> int");
  library.def(
      "rest_backward(Tensor totals, Tensor x, Tensor dy, Tensor w_gate, Tensor? w_up, Tensor w_down_t, Tensor dl1, "
      "Tensor(a!) dx, Tensor(b!) dw_gate, Tensor(c!)? dw_up, Tensor(d!) dw_down_t, Tensor(e!) planes, "
      "Tensor(f!) arrivals) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(sparsellm_cuda, CUDA, library) {
  library.impl("neuron_plan", TORCH_BOX(&neuron_plan));
  library.impl("tile_gradient", TORCH_BOX(&tile_gradient));
  library.impl("tile_spmm", TORCH_BOX(&tile_spmm));
  library.impl("tile_operands", TORCH_BOX(&tile_operands));
  library.impl("tile_weights", TORCH_BOX(&tile_weights));
  library.impl("transpose", TORCH_BOX(&transpose));
  library.impl("rest_backward", TORCH_BOX(&rest_backward));
  library.impl("pointwise_gradient", TORCH_BOX(&pointwise_gradient));
  library.impl("gate_pack", TORCH_BOX(&gate_pack));
  library.impl("pack_rows", TORCH_BOX(&pack_rows));
  library.impl("token_order", TORCH_BOX(&token_order));
  library.impl("tile_plan", TORCH_BOX(&tile_plan));
  library.impl("tile_up", TORCH_BOX(&tile_up));
  library.impl("row_ffn", TORCH_BOX(&row_ffn));
  library.impl("row_rest", TORCH_BOX(&row_rest));
  library.impl("dense_hidden", TORCH_BOX(&dense_hidden));
  library.impl("dense_gradient", TORCH_BOX(&dense_gradient));
  library.impl("pointwise", TORCH_BOX(&pointwise));
}

// Sizes: numbers alone, so of no device.
STABLE_TORCH_LIBRARY_IMPL(sparsellm_cuda, CompositeExplicitAutograd, library) {
  library.impl("order_workspace", TORCH_BOX(&sparsellm::order_workspace));
  library.impl("row_workspace", TORCH_BOX(&sparsellm::row_workspace));
  library.impl("row_rest_workspace", TORCH_BOX(&sparsellm::row_rest_workspace));
  library.impl("rest_backward_workspace", TORCH_BOX(&sparsellm::rest_backward_workspace));
}
