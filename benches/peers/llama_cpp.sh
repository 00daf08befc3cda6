#!/usr/bin/env bash
# llama_cpp.sh FOLDER: makes FOLDER/bin/llama-bench and llama-quantize for this CPU, and FOLDER/e2b-q4_0.gguf with
# random weights. llama.cpp is that of the crate llama-cpp-sys-2, which has no programs: they are from
# llama-cpp-python's source package. Needs curl, a C++ compiler, CMake, Ninja, Python with numpy and gguf, and 13 GB of
# disk. Models other than Gemma 4 are left out, which more than halves the time of the build.
set -euo pipefail
CRATE=0.1.161 PACKAGE=0.3.36
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${1:?usage: llama_cpp.sh FOLDER}/source"
cd "$1"
if [ ! -x bin/llama-bench ]; then
    curl -sSfL "https://static.crates.io/crates/llama-cpp-sys-2/llama-cpp-sys-2-$CRATE.crate" |
        tar xz -C source --strip-components=2 llama-cpp-sys-2-$CRATE/llama.cpp
    python3 -m pip download -q --no-deps --no-binary llama-cpp-python -d . llama-cpp-python==$PACKAGE
    tar xzf "llama_cpp_python-$PACKAGE.tar.gz" -C source --strip-components=3 \
        llama_cpp_python-$PACKAGE/vendor/llama.cpp/tools/{llama-bench,quantize}
    find source/src/models -name '*.cpp' ! -name gemma4.cpp ! -name gemma4-assistant.cpp -delete
    python3 - <<'END'
import re
from pathlib import Path

file = Path("source/src/llama-model.cpp")
case = r"        case LLM_ARCH_\w+:\n            return new llama_model_(?!gemma4\(|gemma4_assistant\()\w+\(params\);\n"
file.write_text(re.sub(case, "", file.read_text()))
END
    cat >source/tools/CMakeLists.txt <<'END'
find_package(Threads REQUIRED)
llama_add_compile_flags()
add_subdirectory(llama-bench)
add_subdirectory(quantize)
END
    cmake -S source -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF
    cmake --build build --target llama-bench llama-quantize
    mkdir -p bin
    cp build/bin/llama-{bench,quantize} bin/
fi
if [ ! -f e2b-q4_0.gguf ]; then
    python3 "$here/random_gguf.py" e2b-bf16.gguf
    bin/llama-quantize e2b-bf16.gguf e2b-q4_0.gguf.part Q4_0
    mv e2b-q4_0.gguf.part e2b-q4_0.gguf
    rm e2b-bf16.gguf
fi
