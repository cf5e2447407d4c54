#include "backend/collectives/gather.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "backend/collectives/arguments.h"
#include "backend/collectives/coalesced_gather.h"
#include "transport/direct_transport.h"

namespace pg_sdma {
namespace {

// Flat views of contiguous tensors [first, last), as bytes.
Tensors byte_views(const Tensors& tensors, size_t first, size_t last) {
  Tensors views;
  for (size_t t = first; t < last; ++t) {
    views.push_back(in_storage_order(tensors[t]).detach().view({-1}).view(at::kByte));
  }
  return views;
}

// One tensor a rank of an output, as gloo takes it apart; none where it cannot.
Tensors chunks(const at::Tensor& output, int world) {
  if (output.dim() == 0 || output.size(0) % world != 0) return {};
  const at::NoGradGuard no_grad;
  return at::chunk(output, world, 0);
}

// As NCCL gathers a list: into one tensor, of which the user's are copies.
c10::IValue stacked(const Tensors& outputs) {
  const at::NoGradGuard no_grad;
  const at::Tensor& first = outputs.front();
  std::vector<int64_t> sizes{static_cast<int64_t>(outputs.size())};
  sizes.insert(sizes.end(), first.sizes().begin(), first.sizes().end());
  at::Tensor stack = at::empty(sizes, first.options());
  const c10::impl::VirtualGuardImpl guard(stack.device().type());
  const c10::Stream stream = guard.getStream(stack.device());
  for (size_t r = 0; r < outputs.size(); ++r) {
    stack.select(0, static_cast<int64_t>(r)).copy_(outputs[r], /*non_blocking=*/true);
    // Who drops an output may have waited for the call and not for this.
    guard.recordDataPtrOnStream(outputs[r].storage().data_ptr(), stream);
  }
  return Tensors{stack};
}

// The input is read while the outputs are written, here and by peers: it may lie in its own place
// among them, and nowhere else.
bool written_while_read(const Piece& piece, int rank) {
  const auto* input = static_cast<const char*>(piece.input);
  for (size_t r = 0; r < piece.outputs.size(); ++r) {
    const auto* output = static_cast<const char*>(piece.outputs[r]);
    const bool apart = output + piece.bytes <= input || input + piece.bytes <= output;
    if (!apart && (r != static_cast<size_t>(rank) || output != input)) return true;
  }
  return false;
}

}  // namespace

Gather::Gather(Form form, int rank, int world, Tensors outputs, Tensors inputs,
               const c10d::AllgatherOptions& options)
    : Collective(form == Form::kList         ? c10d::OpType::ALLGATHER
                 : form == Form::kIntoTensor ? c10d::OpType::_ALLGATHER_BASE
                                             : c10d::OpType::ALLGATHER_COALESCED,
                 rank, world, std::move(outputs), std::move(inputs), options.asyncOp),
      form_(form),
      options_(options) {
  call.operation = name();
  call.dtype = dtypes(inputs_);
  call.listed = form_ == Form::kList;
  call.overlapped = options.asyncOp;
  facts.tensors = static_cast<uint32_t>(inputs_.size());
  // Where the arguments are bad, too, this is the size that the peers most likely see: the static
  // rule has to decide as theirs does.
  for (const at::Tensor& input : inputs_) {
    if (is_plain(input)) facts.total_bytes += input.nbytes() * static_cast<size_t>(world);
  }
  if (form_ == Form::kList && !device().is_cpu()) {
    for (const at::Tensor& output : outputs_) {
      facts.even = facts.even && output.defined() && output.sizes() == outputs_[0].sizes();
    }
    // NCCL takes uneven lists, and whether one is right is for it to say. gloo takes none.
    if (!facts.even) return;
  }
  call.invalid = check();
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

std::string Gather::check() const {
  const std::string who = say("rank ", rank_, ": ", call.operation, ": ");
  const bool list = form_ == Form::kList;
  if (inputs_.empty()) return who + "expected at least one input tensor, got none";
  if (list && outputs_.size() != static_cast<size_t>(world_)) {
    return say(who, "expected a list of ", world_, " output tensors, one a rank, got ",
               outputs_.size());
  }
  if (!list && outputs_.size() != inputs_.size()) {
    return say(who, "expected as many outputs as inputs, got ", outputs_.size(), " outputs and ",
               inputs_.size(), " inputs");
  }
  if (std::string wrong = check_tensors(who); !wrong.empty()) return wrong;
  for (size_t t = 0; t < outputs_.size(); ++t) {
    const at::Tensor& input = inputs_[list ? 0 : t];
    const at::Tensor& output = outputs_[t];
    const std::string at_index = outputs_.size() > 1 ? say(" at index ", t) : "";
    if (input.scalar_type() != output.scalar_type()) {
      return say(who, "expected one dtype, got a ", shape(output), " as output", at_index,
                 " for a ", shape(input), " as input");
    }
    const int64_t expected = input.numel() * (list ? 1 : world_);
    if (output.numel() != expected) {
      return say(who, "expected an output", at_index, " of ", expected, " elements (",
                 list ? "the input's size" : say("world size ", world_, " times the input's"),
                 "), got a ", shape(output), " for a ", shape(input), " as input");
    }
  }
  return "";
}

WorkPtr Gather::on_inner(c10d::Backend& inner) {
  if (form_ == Form::kIntoTensor) return inner._allgather_base(outputs_[0], inputs_[0], options_);
  if (form_ == Form::kIntoTensorCoalesced) {
    return gather_into_tensors(inner, outputs_, inputs_, options_);
  }
  TensorLists lists{outputs_};
  return inner.allgather(lists, inputs_, options_);
}

Collective::Results Gather::results() const {
  if (!call.invalid.empty() || !facts.even) return Collective::results();
  const bool list = form_ == Form::kList;
  if (inner == "nccl" && list) return [outputs = outputs_] { return stacked(outputs); };
  // gloo has coalesced calls on a CPU only: see coalesced_gather.h.
  if (inner != "gloo" || list || (form_ != Form::kIntoTensor && !device().is_cpu())) {
    return Collective::results();
  }
  TensorLists of_rank(static_cast<size_t>(world_));
  for (const at::Tensor& output : outputs_) {
    const Tensors parts = chunks(output, world_);
    if (parts.size() != of_rank.size()) return Collective::results();
    for (size_t r = 0; r < parts.size(); ++r) of_rank[r].push_back(parts[r]);
  }
  if (form_ == Form::kIntoTensor) {
    Tensors parts;
    for (const Tensors& one : of_rank) parts.push_back(one[0]);
    return [parts = std::move(parts)] { return c10::IValue(parts); };
  }
  if (world_ == 1) return [tensors = of_rank[0]] { return c10::IValue(tensors); };
  return [of_rank = std::move(of_rank)] { return c10::IValue(of_rank); };
}

void Gather::run(DirectTransport& transport, const Call& part, const Operation& operation) {
  transport.run(part, operation);
}

void Gather::add_tensors() {
  call.pieces.reserve(inputs_.size());
  for (size_t t = 0; t < inputs_.size(); ++t) add_piece(t);
}

void Gather::add_piece(size_t t) {
  readable_inputs_.push_back(in_storage_order(inputs_[t]).contiguous());
  at::Tensor& input = readable_inputs_.back();
  Piece piece;
  piece.bytes = input.nbytes();
  piece.outputs.reserve(static_cast<size_t>(world_));
  if (form_ == Form::kList) {
    for (const at::Tensor& output : outputs_) {
      // NCCL gathers into one tensor and copies from there, which may change the order of elements.
      if (!device().is_cpu() && output.strides() != outputs_[0].strides()) {
        call.unable = "outputs of one list that lie differently in memory";
      }
      piece.outputs.push_back(landing(output));
    }
  } else {
    auto* base = static_cast<char*>(landing(outputs_[t]));
    for (int r = 0; r < world_; ++r) piece.outputs.push_back(base + piece.bytes * r);
  }
  piece.input = input.const_data_ptr();
  // Such a call is undefined for NCCL, but gloo sends from a copy.
  if (input.device().is_cpu() && written_while_read(piece, rank_)) {
    input = input.clone();
    piece.input = input.const_data_ptr();
  }
  call.pieces.push_back(std::move(piece));
}

Call Gather::part(size_t first, size_t last) const {
  Call part = call;
  if (last - first < call.pieces.size()) {
    part.pieces.assign(call.pieces.begin() + first, call.pieces.begin() + last);
    for (const Piece& piece : call.pieces) part.whole.push_back(piece.bytes);
  }
  return part;
}

std::vector<WorkPtr> Gather::part_on_inner(c10d::Backend& inner, size_t first, size_t last) {
  if (!device().is_cpu()) {
    Tensors inputs = byte_views(inputs_, first, last);
    if (form_ == Form::kList) {
      TensorLists outputs{byte_views(outputs_, 0, outputs_.size())};
      return {inner.allgather(outputs, inputs, options_)};
    }
    Tensors outputs = byte_views(outputs_, first, last);
    if (outputs.size() == 1) return {inner._allgather_base(outputs[0], inputs[0], options_)};
    return {gather_into_tensors(inner, outputs, inputs, options_)};
  }
  // Every view keeps the call's tensors: the inner may outlast who waits for it.
  const auto bytes = [self = shared_from_this()](const void* data, size_t size) {
    return at::from_blob(
        const_cast<void*>(data), {static_cast<int64_t>(size)}, [self](void*) {}, at::kByte);
  };
  std::vector<WorkPtr> works;
  for (size_t t = first; t < last; ++t) {
    const Piece& piece = call.pieces[t];
    Tensors inputs{bytes(piece.input, piece.bytes)};
    TensorLists outputs(1);
    for (void* output : piece.outputs) outputs[0].push_back(bytes(output, piece.bytes));
    works.push_back(inner.allgather(outputs, inputs, options_));
  }
  return works;
}

}  // namespace pg_sdma
