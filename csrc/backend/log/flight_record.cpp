#include "backend/log/flight_record.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <sstream>

namespace pg_sdma {
namespace {

std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      json += '\\';
      json += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      json += escaped;
    } else {
      json += c;
    }
  }
  return json + "\"";
}

// Of one JSON object, in the order given.
class Object {
 public:
  Object& text(const char* name, const std::string& value) { return raw(name, quoted(value)); }
  template <class Number>
  Object& number(const char* name, Number value) {
    return raw(name, std::to_string(value));
  }
  Object& boolean(const char* name, bool value) { return raw(name, value ? "true" : "false"); }
  Object& raw(const char* name, const std::string& json) {
    if (!text_.empty()) text_ += ",";
    text_ += quoted(name) + ":" + json;
    return *this;
  }
  std::string json() const { return "{" + text_ + "}"; }

 private:
  std::string text_;
};

template <class Items, class ToJson>
std::string array(const Items& items, ToJson to_json) {
  std::string json;
  for (const auto& item : items) json += (json.empty() ? "" : ",") + to_json(item);
  return "[" + json + "]";
}

std::string entry_json(const FlightRecorder::Entry& entry, const LaneRecord& lane) {
  // A stream's operations end where no host looks; the page tells.
  const bool over = entry.state == FlightRecorder::State::kEnqueued && !lane.ranks.empty() &&
                    std::all_of(lane.ranks.begin(), lane.ranks.end(),
                                [&](const RankProgress& r) { return r.finished >= entry.number; });
  const auto state = over ? FlightRecorder::State::kCompleted : entry.state;
  return Object()
      .number("id", entry.id)
      .text("operation", entry.made.operation)
      .text("route", entry.route)
      .text("reason", entry.reason)
      .number("number", entry.number)
      .text("state", name_of(state))
      .boolean("async_op", entry.made.async)
      .number("tensors", entry.made.tensors)
      .text("dtype", entry.made.tensors == 0 ? "" : c10::toString(entry.made.dtype))
      .number("input_elements", entry.made.input_elements)
      .number("output_elements", entry.made.output_elements)
      .number("stream", entry.stream)
      .number("timeout_ms", entry.made.timeout_ms)
      .number("created_ns", entry.created_ns)
      .number("started_ns", entry.started_ns)
      .number("decided_ns", entry.decided_ns)
      .number("issued_ns", entry.issued_ns)
      .number("ended_ns", entry.ended_ns)
      .json();
}

std::string rank_json(const RankProgress& rank) {
  return Object()
      .number("rank", rank.rank)
      .number("called", rank.called)
      .number("started", rank.started)
      .number("finished", rank.finished)
      .number("filled", rank.filled)
      .number("others", rank.others)
      .text("other", rank.other)
      .boolean("departed", rank.departed)
      .boolean("ended", rank.ended)
      .json();
}

struct Registry {
  std::mutex mutex;
  const pid_t process = getpid();
  std::vector<const Recorded*> lanes;
};

// A forked child begins with a new one: the parent's lanes are not its own, and the parent's lock
// may have been held by a thread that the child does not have.
Registry& registry() {
  static Registry* registry = new Registry();  // lanes may go after static destructors
  if (registry->process != getpid()) registry = new Registry();
  return *registry;
}

}  // namespace

std::string to_json(const LaneRecord& lane) {
  return Object()
      .text("group", lane.group)
      .text("device", lane.device)
      .text("inner", lane.inner)
      .number("rank", lane.rank)
      .raw("global_ranks", array(lane.global_ranks, [](int rank) { return std::to_string(rank); }))
      .text("fault", lane.fault)
      .number("capacity", lane.capacity)
      .number("recorded", lane.recorded)
      .number("number", lane.number)
      .raw("ranks", array(lane.ranks, rank_json))
      .raw("entries", array(lane.entries,
                            [&](const FlightRecorder::Entry& entry) {
                              return "\n" + entry_json(entry, lane);
                            }))
      .json();
}

namespace flight_record {

void add(const Recorded* lane) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.lanes.push_back(lane);
}

void remove(const Recorded* lane) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.lanes.erase(std::remove(all.lanes.begin(), all.lanes.end(), lane), all.lanes.end());
}

std::string json(int rank, const std::string& reason) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  Registry& all = registry();
  std::string lanes;
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    lanes = array(all.lanes, [](const Recorded* lane) { return "\n" + to_json(lane->record()); });
  }
  return Object()
      .number("version", 1)
      .number("rank", rank)
      .number("pid", getpid())
      .number("time_ns", std::chrono::duration_cast<std::chrono::nanoseconds>(now).count())
      .text("reason", reason)
      .raw("lanes", lanes)
      .json();
}

std::string write(const std::string& prefix, int rank, const std::string& reason) {
  const std::string text = json(rank, reason);
  const std::string path = prefix + std::to_string(rank) + ".json";
  std::string partial = path + ".XXXXXX";
  const auto why = [&] { return "writing " + path + ": " + std::strerror(errno); };
  // A new file, for its owner alone: whatever waits in a folder that others can write to.
  const int file = mkostemp(partial.data(), O_CLOEXEC);
  if (file < 0) return why();
  for (size_t done = 0; done < text.size();) {
    const ssize_t some = ::write(file, text.data() + done, text.size() - done);
    if (some < 0 && errno == EINTR) continue;
    if (some < 0) {
      const std::string reason_why = why();
      close(file);
      unlink(partial.c_str());
      return reason_why;
    }
    done += static_cast<size_t>(some);
  }
  close(file);
  return rename(partial.c_str(), path.c_str()) == 0 ? "" : why();
}

}  // namespace flight_record
}  // namespace pg_sdma
