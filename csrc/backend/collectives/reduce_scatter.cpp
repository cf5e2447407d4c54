#include "backend/collectives/reduce_scatter.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <string>

#include "backend/collectives/arguments.h"
#include "torch_version.h"
#include "transport/direct_transport.h"

namespace pg_sdma {
namespace {

c10d::OpType type_of(ReduceScatter::Form form) {
  if (form == ReduceScatter::Form::kList) return c10d::OpType::REDUCE_SCATTER;
#if PG_SDMA_TORCH_AT_LEAST(2, 13)
  if (form == ReduceScatter::Form::kTensorCoalesced) {
    return c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED;
  }
#endif
  return c10d::OpType::_REDUCE_SCATTER_BASE;
}

}  // namespace

ReduceScatter::ReduceScatter(Form form, int rank, int world, Tensors outputs, Tensors inputs,
                             const c10d::ReduceScatterOptions& options, size_t landing_bytes)
    : Collective(type_of(form), rank, world, std::move(outputs), std::move(inputs),
                 options.asyncOp),
      form_(form),
      options_(options),
      landing_bytes_(landing_bytes) {
  call.operation = name();
  call.dtype = dtypes(inputs_);
  call.listed = form_ == Form::kList;
  facts.tensors = static_cast<uint32_t>(outputs_.size());
  // Where the arguments are bad, too, this is the size that the peers most likely see: the static
  // rule has to decide as theirs does.
  for (const at::Tensor& input : inputs_) {
    if (is_plain(input)) facts.total_bytes += input.nbytes();
  }
  facts.sums = !device().is_cpu();
  facts.unsupported = unsupported();
  // Then it is the inner's to say what is right.
  if (facts.unsupported.empty()) call.invalid = check();
}

const char* ReduceScatter::name() const {
  switch (form_) {
    case Form::kTensor:
      return "reduce_scatter_tensor";
    case Form::kTensorCoalesced:
      return "reduce_scatter_tensor_coalesced";
    default:
      return "reduce_scatter";
  }
}

std::string ReduceScatter::unsupported() const {
  if (!device().is_cpu() && !device().is_cuda()) {
    return say("reduce-scatter of ", device().type(), " tensors");
  }
  if (std::string why = refusal(options_.reduceOp, device()); !why.empty()) return why;
  for (const at::Tensor& input : inputs_) {
    if (input.defined() && !HostReducer::takes(input.scalar_type())) {
      return say("reduce-scatter of ", c10::toString(input.scalar_type()));
    }
  }
  if (form_ == Form::kList && world_ > kMaxTensors) return "a list for too many ranks";
  return "";
}

std::string ReduceScatter::check() const {
  const std::string who = say("rank ", rank_, ": ", call.operation, ": ");
  const bool list = form_ == Form::kList;
  if (outputs_.empty()) return who + "expected at least one output tensor, got none";
  if (list && inputs_.size() != static_cast<size_t>(world_)) {
    return say(who, "expected a list of ", world_, " input tensors, one a rank, got ",
               inputs_.size());
  }
  if (!list && outputs_.size() != inputs_.size()) {
    return say(who, "expected as many outputs as inputs, got ", outputs_.size(), " outputs and ",
               inputs_.size(), " inputs");
  }
  if (std::string wrong = check_tensors(who); !wrong.empty()) return wrong;
  for (size_t t = 0; t < inputs_.size(); ++t) {
    const at::Tensor& input = inputs_[t];
    const at::Tensor& output = outputs_[list ? 0 : t];
    const std::string at_index = inputs_.size() > 1 ? say(" at index ", t) : "";
    if (input.scalar_type() != output.scalar_type()) {
      return say(who, "expected one dtype, got a ", shape(output), " as output for a ",
                 shape(input), " as input", at_index);
    }
    const int64_t expected = output.numel() * (list ? 1 : world_);
    if (input.numel() != expected) {
      return say(who, "expected an input", at_index, " of ", expected, " elements (",
                 list ? "the output's size" : say("world size ", world_, " times the output's"),
                 "), got a ", shape(input), " for a ", shape(output), " as output");
    }
  }
  return "";
}

WorkPtr ReduceScatter::on_inner(c10d::Backend& inner) {
  if (form_ == Form::kTensor) {
    return inner._reduce_scatter_base(outputs_[0], inputs_[0], options_);
  }
  if (form_ == Form::kTensorCoalesced) {
    return inner.reduce_scatter_tensor_coalesced(outputs_, inputs_, options_);
  }
  TensorLists lists{inputs_};
  return inner.reduce_scatter(outputs_, lists, options_);
}

void ReduceScatter::get_ready() {
  if (device().is_cpu() || !call.invalid.empty() || !facts.unsupported.empty()) return;
  try {
    const Reduction::Kind kind = kind_of(options_.reduceOp);
    for (size_t t = 0; t < outputs_.size(); ++t) {
      const at::ScalarType type = outputs_[t].scalar_type();
      const kernels::Kernel kernel =
          kernels::find({device().index(), type, world_, rank_, kind, aligned(t)});
      kernels_.push_back({kernel, c10::elementSize(type)});
    }
  } catch (const std::exception& error) {
    call.unable = first_line(error.what());
  }
}

bool ReduceScatter::aligned(size_t t) const {
  const at::Tensor& output = outputs_[t];
  const at::Tensor& input = inputs_[input_of(t, rank_)];
  const size_t own = form_ == Form::kList ? 0 : output.nbytes() * static_cast<size_t>(rank_);
  // The kernel gets a copy of what is not contiguous, and every copy begins at a multiple.
  const auto at_multiple = [](const at::Tensor& tensor, size_t offset) {
    const bool as_it_is = in_storage_order(tensor).is_contiguous();
    const auto first = as_it_is ? reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) : 0;
    return (first + offset) % kMostElement == 0;
  };
  return at_multiple(output, 0) && at_multiple(input, own);
}

void ReduceScatter::add_tensors() {
  const Reduction reduction = read_reduction(options_.reduceOp);
  call.reduction = reduction.words();
  for (const at::Tensor& input : inputs_) {
    readable_inputs_.push_back(in_storage_order(input).contiguous());
  }
  call.shares.reserve(outputs_.size());
  for (size_t t = 0; t < outputs_.size(); ++t) add_share(t);
  // NCCL asks its callers to keep them apart, and where each tensor lies has been looked at.
  if (device().is_cpu()) keep_apart();
  point_slices();
  make_reducer(reduction);
}

void ReduceScatter::make_reducer(const Reduction& reduction) {
  std::vector<at::ScalarType> types;
  for (const at::Tensor& output : outputs_) types.push_back(output.scalar_type());
  size_t slice_bytes = 0;
  for (const Share& share : call.shares) slice_bytes += share.bytes + kMostElement - 1;
  if (!device().is_cpu()) {
    // Where there is no kernel the call goes to the inner.
    if (!call.unable.empty()) return;
    device_reducer_ = std::make_unique<DeviceReducer>(reduction, rank_, world_, kernels_,
                                                      slice_bytes, landing_bytes_, device());
    return;
  }
  reducer_ = std::make_unique<HostReducer>(reduction, rank_, world_, std::move(types), slice_bytes,
                                           landing_bytes_);
}

void ReduceScatter::forget_tensors() {
  call.shares.clear();
  readable_inputs_.clear();
}

void ReduceScatter::run(DirectTransport& transport, const Call& part, const Operation& operation) {
  if (device_reducer_) {
    transport.run(part, operation, *device_reducer_);
  } else {
    transport.run(part, operation, *reducer_);
  }
}

void ReduceScatter::followed_by(c10::Stream stream) {
  // The allocator gives the landing to whoever comes next on the stream of the call, which may not
  // be the one that is ordered behind it.
  if (device_reducer_ && stream != device_reducer_->stream())
    device_reducer_->record_stream(stream);
}

void ReduceScatter::add_share(size_t t) {
  Share share;
  share.tensor = t;
  share.bytes = outputs_[t].nbytes();
  share.output = landing(outputs_[t]);
  call.shares.push_back(std::move(share));
}

size_t ReduceScatter::input_of(size_t tensor, int rank) const {
  return form_ == Form::kList ? static_cast<size_t>(rank) : tensor;
}

void ReduceScatter::keep_apart() {
  for (size_t i = 0; i < readable_inputs_.size(); ++i) {
    at::Tensor& input = readable_inputs_[i];
    const auto* first = static_cast<const char*>(input.const_data_ptr());
    const bool own = form_ != Form::kList || i == static_cast<size_t>(rank_);
    for (const Share& share : call.shares) {
      const auto* output = static_cast<const char*>(share.output);
      const auto* own_slice = first + (form_ == Form::kList ? 0 : share.bytes * rank_);
      const bool in_place = own && output == own_slice && input_of(share.tensor, rank_) == i;
      const bool apart = output + share.bytes <= first || first + input.nbytes() <= output;
      if (apart || in_place) continue;
      input = input.clone();
      break;
    }
  }
}

void ReduceScatter::point_slices() {
  for (Share& share : call.shares) {
    for (int r = 0; r < world_; ++r) {
      const at::Tensor& input = readable_inputs_[input_of(share.tensor, r)];
      const auto* first = static_cast<const char*>(input.const_data_ptr());
      share.slices.push_back(first + (form_ == Form::kList ? 0 : share.bytes * r));
    }
  }
}

Call ReduceScatter::part(size_t first, size_t last) const {
  Call part = call;
  if (last - first < call.shares.size()) {
    part.shares.assign(call.shares.begin() + first, call.shares.begin() + last);
    for (const Share& share : call.shares) part.whole.push_back(share.bytes);
  }
  return part;
}

std::vector<WorkPtr> ReduceScatter::whole_part_on_inner(c10d::Backend& inner, size_t first,
                                                        size_t last) {
  if (last - first == outputs_.size()) return {on_inner(inner)};
  Tensors outputs(outputs_.begin() + first, outputs_.begin() + last);
  Tensors inputs(inputs_.begin() + first, inputs_.begin() + last);
  return {inner.reduce_scatter_tensor_coalesced(outputs, inputs, options_)};
}

std::vector<WorkPtr> ReduceScatter::part_on_inner(c10d::Backend& inner, size_t first, size_t last) {
  if (!device().is_cpu()) return whole_part_on_inner(inner, first, last);
  const at::NoGradGuard no_grad;
  const auto as_bytes = [](const at::Tensor& tensor) {
    return tensor.detach().view({-1}).view(at::kByte);
  };
  std::vector<WorkPtr> works;
  for (size_t t = first; t < last; ++t) {
    const Share& share = call.shares[t];
    if (share.bytes == 0) continue;
    at::Tensor sent;
    if (form_ == Form::kList) {
      Tensors slices;
      for (const at::Tensor& input : readable_inputs_) slices.push_back(as_bytes(input));
      sent = at::cat(slices);
    } else {
      sent = as_bytes(readable_inputs_[t]);
    }
    at::Tensor received = at::empty_like(sent);
    std::vector<int64_t> even;
    c10d::AllToAllOptions options;
    options.timeout = call.timeout;
    works.push_back(inner.alltoall_base(received, sent, even, even, options));
    received_.emplace_back(t, std::move(received));
  }
  return works;
}

void ReduceScatter::finish() {
  std::vector<const void*> slices(static_cast<size_t>(world_));
  for (const auto& [t, received] : received_) {
    const Share& share = call.shares[t];
    const auto* first = static_cast<const char*>(received.const_data_ptr());
    for (size_t offset = 0; offset < share.bytes;) {
      const size_t bytes = std::min(reducer_->room(), share.bytes - offset);
      for (size_t r = 0; r < slices.size(); ++r) slices[r] = first + r * share.bytes + offset;
      reducer_->reduce(share, offset, bytes, slices);
      offset += bytes;
    }
  }
  Collective::finish();
  // Ours alone, so whatever thread this is may drop them.
  reducer_.reset();
  received_.clear();
}

}  // namespace pg_sdma
