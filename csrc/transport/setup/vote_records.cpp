#include "transport/setup/vote_records.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>

#include "engine/inject.h"

namespace pg_sdma {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string link_target(const char* path) {
  char target[256];
  const ssize_t length = readlink(path, target, sizeof target);
  return length > 0 ? std::string(target, static_cast<size_t>(length)) : "";
}

// The words of `text` that `other` does not have.
std::string only_in(const std::string& text, const std::string& other) {
  std::istringstream others(other);
  const std::set<std::string> known{std::istream_iterator<std::string>(others), {}};
  std::istringstream words(text);
  std::string found;
  for (std::string word; words >> word;) {
    if (known.count(word) == 0) found += (found.empty() ? "" : " ") + word;
  }
  return found.empty() ? "no more than that" : found;
}

}  // namespace

std::string write_fields(const Fields& fields) {
  std::string text;
  for (const auto& [name, value] : fields) text += name + "=" + value + "\n";
  return text;
}

Fields read_fields(const std::string& text) {
  Fields fields;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t at = line.find('=');
    if (at != std::string::npos) fields[line.substr(0, at)] = line.substr(at + 1);
  }
  return fields;
}

std::string write_list(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts) all += std::to_string(text.size()) + "\n" + text;
  return all;
}

std::vector<std::string> read_list(const std::string& text) {
  std::vector<std::string> texts;
  for (size_t at = 0; at < text.size();) {
    const size_t first = text.find('\n', at) + 1;
    const size_t size = std::stoull(text.substr(at, first - at));
    texts.push_back(text.substr(first, size));
    at = first + size;
  }
  return texts;
}

std::string host_identity() {
  return first_line("/proc/sys/kernel/random/boot_id") + " " + link_target("/proc/self/ns/pid") +
         " uid:" + std::to_string(geteuid()) + (inject::corrupts("host") ? " elsewhere" : "");
}

std::string one_line(std::string text) {
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  return text;
}

std::optional<std::string> objection(const std::vector<std::string>& records) {
  const Fields first = read_fields(records[0]);
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const Fields mine = read_fields(records[rank]);
    const std::string who = "rank " + std::to_string(rank);
    if (mine.at("protocol") != first.at("protocol")) {
      return who + " runs another version of pg_sdma than rank 0";
    }
    if (mine.at("enabled") != "1") return "PG_SDMA=off on " + who;
    if (mine.at("settings") != first.at("settings")) {
      return std::string(kSettingsDiffer) + "rank 0 has " +
             only_in(first.at("settings"), mine.at("settings")) + ", " + who + " has " +
             only_in(mine.at("settings"), first.at("settings"));
    }
    if (mine.at("host") != first.at("host")) {
      return who + " is on another host, in another pid namespace, or another user's, than rank 0";
    }
  }
  return std::nullopt;
}

std::string no_sums(const std::vector<std::string>& records) {
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const std::string why = read_fields(records[rank]).at("no_sums");
    if (!why.empty()) return why + " on rank " + std::to_string(rank);
  }
  return "";
}

bool all_have_offers(const std::vector<std::string>& records) {
  return std::all_of(records.begin(), records.end(), [](const std::string& record) {
    return read_fields(record).at("offer") == "1";
  });
}

bool off_everywhere(const std::vector<std::string>& records) {
  return std::all_of(records.begin(), records.end(), [](const std::string& record) {
    return read_fields(record).at("enabled") != "1";
  });
}

std::optional<std::string> first_no(const std::vector<std::string>& answers) {
  for (const char* kind : {kRefused, kFound, kHeard}) {
    for (size_t rank = 0; rank < answers.size(); ++rank) {
      Fields answer = read_fields(answers[rank]);
      const auto no = answer.find("no");
      if (no == answer.end() || answer["kind"] != kind) continue;
      return (kind == kHeard ? "" : "rank " + std::to_string(rank) + ": ") + no->second;
    }
  }
  return std::nullopt;
}

}  // namespace pg_sdma
