#include "backend/gather.h"

#include <algorithm>
#include <sstream>

namespace pg_sdma {
namespace {

template <class... Parts>
std::string say(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

std::string shape(const at::Tensor& tensor) {
  return say(c10::toString(tensor.scalar_type()), " tensor of shape ", tensor.sizes());
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided;
}

}  // namespace

Gather::Gather(Form form, int rank, int world, Tensors outputs, Tensors inputs,
               const c10d::AllgatherOptions& options)
    : async(options.asyncOp),
      type(form == Form::kList ? c10d::OpType::ALLGATHER
                               : form == Form::kIntoTensor ? c10d::OpType::_ALLGATHER_BASE
                                                           : c10d::OpType::ALLGATHER_COALESCED),
      form_(form),
      outputs_(std::move(outputs)),
      inputs_(std::move(inputs)),
      options_(options) {
  call.operation = name();
  call.dtype = inputs_.empty() || !inputs_[0].defined()
                   ? "no"
                   : c10::toString(inputs_[0].scalar_type());
  facts.tensors = static_cast<uint32_t>(inputs_.size());
  if (form_ == Form::kList) {
    for (const at::Tensor& output : outputs_) {
      facts.even = facts.even && output.defined() && output.sizes() == outputs_[0].sizes();
    }
    // An uneven list is the inner's business, and so is whether it is right.
    if (!facts.even) return;
  }
  call.invalid = check(rank, world);
  if (!call.invalid.empty()) {
    // The size that the peers most likely see, so that the static rule decides as theirs does.
    for (const at::Tensor& input : inputs_) {
      if (input.defined()) facts.output_bytes += input.nbytes() * static_cast<size_t>(world);
    }
    return;
  }

  // Peers read whole shards: what is not contiguous is gathered through a contiguous stand-in.
  const auto stand_in = [this](const at::Tensor& output) {
    if (output.is_contiguous()) return output;
    stand_ins_.emplace_back(output, at::empty(output.sizes(), output.options()));
    return stand_ins_.back().second;
  };
  call.pieces.resize(inputs_.size());
  for (size_t t = 0; t < inputs_.size(); ++t) {
    contiguous_inputs_.push_back(inputs_[t].contiguous());
    const at::Tensor& input = contiguous_inputs_.back();
    Piece& piece = call.pieces[t];
    piece.input = input.const_data_ptr();
    piece.bytes = input.nbytes();
    piece.outputs.reserve(static_cast<size_t>(world));
    if (form_ == Form::kList) {
      for (const at::Tensor& output : outputs_) {
        piece.outputs.push_back(stand_in(output).mutable_data_ptr());
      }
    } else {
      auto* base = static_cast<char*>(stand_in(outputs_[t]).mutable_data_ptr());
      for (int r = 0; r < world; ++r) piece.outputs.push_back(base + piece.bytes * r);
    }
    facts.output_bytes += piece.bytes * static_cast<size_t>(world);
  }
}

const char* Gather::name() const {
  switch (form_) {
    case Form::kIntoTensor:
      return "all_gather_into_tensor";
    case Form::kIntoTensorCoalesced:
      return "all_gather_into_tensor_coalesced";
    default:
      return "all_gather";
  }
}

std::string Gather::check(int rank, int world) const {
  const std::string who = say("rank ", rank, ": ", call.operation, ": ");
  const bool list = form_ == Form::kList;
  if (inputs_.empty()) return who + "expected at least one input tensor, got none";
  if (list && outputs_.size() != static_cast<size_t>(world)) {
    return say(who, "expected a list of ", world, " output tensors, one a rank, got ",
               outputs_.size());
  }
  if (!list && outputs_.size() != inputs_.size()) {
    return say(who, "expected as many outputs as inputs, got ", outputs_.size(), " outputs and ",
               inputs_.size(), " inputs");
  }
  const at::Device device = inputs_[0].defined() ? inputs_[0].device() : at::Device(at::kCPU);
  for (const Tensors* tensors : {&inputs_, &outputs_}) {
    for (const at::Tensor& tensor : *tensors) {
      const char* which = tensors == &inputs_ ? "an input" : "an output";
      if (!is_plain(tensor)) return say(who, "expected dense tensors, ", which, " is not");
      if (tensor.device() != device) {
        return say(who, "expected all tensors on ", device, ", ", which, " is on ",
                   tensor.device());
      }
      // gloo copies for its callers, NCCL asks for contiguous tensors: each inner's users get what
      // they are used to.
      if (!device.is_cpu() && !tensor.is_contiguous()) {
        return say(who, "expected contiguous tensors, ", which, " (", shape(tensor),
                   ") is not; pass tensor.contiguous()");
      }
    }
  }
  for (size_t t = 0; t < outputs_.size(); ++t) {
    const at::Tensor& input = inputs_[list ? 0 : t];
    const at::Tensor& output = outputs_[t];
    const std::string at_index = outputs_.size() > 1 ? say(" at index ", t) : "";
    if (input.scalar_type() != output.scalar_type()) {
      return say(who, "expected one dtype, got a ", shape(output), " as output", at_index,
                 " for a ", shape(input), " as input");
    }
    const int64_t expected = input.numel() * (list ? 1 : world);
    if (output.numel() != expected) {
      return say(who, "expected an output", at_index, " of ", expected, " elements (",
                 list ? "the input's size" : say("world size ", world, " times the input's"),
                 "), got a ", shape(output), " for a ", shape(input), " as input");
    }
  }
  return "";
}

WorkPtr Gather::on_inner(c10d::Backend& inner) {
  if (form_ == Form::kIntoTensor) return inner._allgather_base(outputs_[0], inputs_[0], options_);
  if (form_ == Form::kIntoTensorCoalesced) {
    return inner.allgather_into_tensor_coalesced(outputs_, inputs_, options_);
  }
  TensorLists lists{outputs_};
  return inner.allgather(lists, inputs_, options_);
}

WorkPtr Gather::part_on_inner(c10d::Backend& inner, size_t first, size_t last) {
  if (!inputs_[0].device().is_cpu()) {
    if (form_ != Form::kIntoTensorCoalesced || last - first == inputs_.size()) {
      return on_inner(inner);
    }
    Tensors outputs(outputs_.begin() + first, outputs_.begin() + last);
    Tensors inputs(inputs_.begin() + first, inputs_.begin() + last);
    return inner.allgather_into_tensor_coalesced(outputs, inputs, options_);
  }
  const auto bytes = [](const void* data, size_t size) {
    return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(size)}, at::kByte);
  };
  for (size_t t = first; t < last; ++t) {
    const Piece& piece = call.pieces[t];
    Tensors inputs{bytes(piece.input, piece.bytes)};
    TensorLists outputs(1);
    for (void* output : piece.outputs) outputs[0].push_back(bytes(output, piece.bytes));
    inner.allgather(outputs, inputs, options_)->wait();
  }
  return nullptr;
}

Call Gather::part(size_t first, size_t last) const {
  Call part = call;
  if (last - first < call.pieces.size()) {
    part.pieces.assign(call.pieces.begin() + first, call.pieces.begin() + last);
  }
  return part;
}

void Gather::finish() {
  for (const auto& [output, stand_in] : stand_ins_) output.copy_(stand_in);
}

}  // namespace pg_sdma
