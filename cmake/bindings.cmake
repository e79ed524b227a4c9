# One extension module per .pyx; all of them link to the one libunimem in unimem/lib. What Cython
# would put into each, such as memoryviews, is in a module of its own, unimem._core.cyutility.
# scikit-build-core says where the headers of Python and NumPy are, and how a module is called. CMake
# would ask the Python that builds, which need not be the one that the wheel is for.
foreach(found Python_INCLUDE_DIR Python_NumPy_INCLUDE_DIR SKBUILD_SOABI)
  if(NOT ${found})
    message(FATAL_ERROR "${found} is not set: expected a build by pip, with NumPy installed")
  endif()
endforeach()
find_program(CYTHON cython HINTS ${Python_EXECUTABLE}/.. REQUIRED)

# Every module runs without the interpreter's lock, where Python has none: docs/threads.md.
set(UNIMEM_CYTHON_OPTIONS -3 -X freethreading_compatible=True)
if(UNIMEM_COVERAGE)
  # gcov then counts the lines of the .pyx.
  list(APPEND UNIMEM_CYTHON_OPTIONS --line-directives)
endif()

set(UNIMEM_UTILITY unimem._core.cyutility)

file(GLOB UNIMEM_PXD CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/unimem/*/*.pxd
  ${CMAKE_SOURCE_DIR}/src/unimem/*/*/*.pxd)

# Modules that are called when something is made or read, not once a token: they are made small.
set(UNIMEM_COLD cyutility status dlpack foreign region mapping growth block header_bytes gguf
  safetensors load guard tmpfs device parts scratchpad thread_count)

# Builds one module of the room ROOM, such as kv or kv/cache, from its C file.
function(unimem_add_module room module c_file)
  string(REPLACE / _ target ${room}_${module})
  string(REGEX REPLACE "[^/]+" ".." up ${room})
  add_library(${target} MODULE ${c_file})
  set_target_properties(${target} PROPERTIES
    PREFIX "" OUTPUT_NAME ${module} SUFFIX .${SKBUILD_SOABI}.so
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bindings/${room}
    INSTALL_RPATH "$ORIGIN/${up}/lib" BUILD_WITH_INSTALL_RPATH ON)
  target_compile_definitions(${target} PRIVATE NPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION
    NPY_TARGET_VERSION=NPY_2_0_API_VERSION)
  if(module IN_LIST UNIMEM_COLD)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-Os>)
  endif()
  target_include_directories(${target} SYSTEM PRIVATE
    ${Python_INCLUDE_DIR} ${Python_NumPy_INCLUDE_DIR})
  target_link_libraries(${target} PRIVATE unimem)
  install(TARGETS ${target} DESTINATION unimem/${room})
endfunction()

# Builds the named modules of the room ROOM, which is the folder src/unimem/ROOM. One call
# of Cython translates a room: it reads what the modules share once.
function(unimem_add_bindings room)
  set(folder ${CMAKE_BINARY_DIR}/bindings/${room})
  list(TRANSFORM ARGN REPLACE "(.+)" "${CMAKE_SOURCE_DIR}/src/unimem/${room}/\\1.pyx"
    OUTPUT_VARIABLE sources)
  list(TRANSFORM ARGN REPLACE "(.+)" "${folder}/\\1.c" OUTPUT_VARIABLE c_files)
  file(MAKE_DIRECTORY ${folder})
  add_custom_command(
    OUTPUT ${c_files}
    COMMAND ${CYTHON} ${UNIMEM_CYTHON_OPTIONS} --shared=${UNIMEM_UTILITY}
            -I ${CMAKE_SOURCE_DIR}/src ${sources} --output-file ${folder}
    DEPENDS ${sources} ${UNIMEM_PXD}
    VERBATIM)
  string(REPLACE / _ bindings ${room}_bindings)
  add_custom_target(${bindings} DEPENDS ${c_files})
  foreach(module ${ARGN})
    unimem_add_module(${room} ${module} ${folder}/${module}.c)
    string(REPLACE / _ target ${room}_${module})
    add_dependencies(${target} ${bindings})
  endforeach()
endfunction()

set(UNIMEM_UTILITY_C ${CMAKE_BINARY_DIR}/bindings/_core/cyutility.c)
add_custom_command(
  OUTPUT ${UNIMEM_UTILITY_C}
  COMMAND ${CYTHON} ${UNIMEM_CYTHON_OPTIONS} --module-name ${UNIMEM_UTILITY}
          --generate-shared=${UNIMEM_UTILITY_C}
  VERBATIM)
unimem_add_module(_core cyutility ${UNIMEM_UTILITY_C})
unimem_add_bindings(_core status dlpack arrays foreign region mapping growth block tape grid
  load guard tmpfs empty_call)
unimem_add_bindings(kv arrays states paged scratchpad rotate_heads)
unimem_add_bindings(kv/cache rows storage cache parts layered device)
unimem_add_bindings(weights header_bytes gguf safetensors)
unimem_add_bindings(engine thread_count turns rotation_op forward)
