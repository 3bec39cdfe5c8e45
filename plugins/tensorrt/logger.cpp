#include "tensorrt/logger.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>

namespace trtconvert::plugin {
namespace {

// The finder and its interface version, packed into one word so that both change at once: TensorRT may load the library from one
// thread while another logs. Objects are aligned to eight bytes, which leaves bit 0 free.
constexpr uintptr_t kVersioned = 1;
std::atomic<uintptr_t> g_finder{0};

// True if the logger interfaces are versioned, which TensorRT 11 introduced. The object itself cannot be asked, because its answer
// is in different slots; the library of its virtual table can.
bool has_versioned_logger(void* finder) noexcept {
  Dl_info info;
  if (dladdr(*static_cast<void**>(finder), &info) == 0) return false;
  void* library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return false;
  auto const version = reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibVersion"));
  // 10.6.0 is 100600, 11.2.1 is 110201.
  bool const versioned = version != nullptr && version() >= 110000;
  dlclose(library);
  return versioned;
}

template <typename Finder>
bool log_through(uintptr_t finder, Severity severity, char const* message) {
  auto* logger = reinterpret_cast<Finder*>(finder)->findLogger();
  if (logger == nullptr) return false;
  logger->log(severity, message);
  return true;
}

}  // namespace

void set_logger_finder(void* finder) noexcept {
  auto word = reinterpret_cast<uintptr_t>(finder);
  if (finder != nullptr && has_versioned_logger(finder)) word |= kVersioned;
  g_finder.store(word);
}

void log(Severity severity, char const* format, ...) noexcept {
  char message[1024];
  constexpr char kPrefix[] = "trtconvert: ";
  std::snprintf(message, sizeof(message), "%s", kPrefix);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message + sizeof(kPrefix) - 1, sizeof(message) - sizeof(kPrefix) + 1, format, arguments);
  va_end(arguments);

  bool logged = false;
  try {
    uintptr_t const finder = g_finder.load();
    if (finder & kVersioned) {
      logged = log_through<abi::v11::ILoggerFinder>(finder & ~kVersioned, severity, message);
    } else if (finder != 0) {
      logged = log_through<abi::v10::ILoggerFinder>(finder, severity, message);
    }
  } catch (...) {
    // findLogger() is not noexcept, and no exception may reach the caller, TensorRT.
  }
  if (!logged && severity <= Severity::kERROR) std::fprintf(stderr, "%s\n", message);
}

}  // namespace trtconvert::plugin
